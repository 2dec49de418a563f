"""A transport tried out on scratch memory: bytes really move, and nothing is left."""

import ctypes

import pytest

from connectors.loopback import LoopbackConnector
from kvxfer.memory.host import HostDriver
from kvxfer.memory.virtual_buffer import VirtualBuffer
from kvxfer.transfer.connector import Connector, MemoryWindow

GRANULE = 4096


def connector_types():
    from connectors.nixl import NixlConnector

    return [LoopbackConnector, NixlConnector]


@pytest.mark.parametrize("kind", connector_types(), ids=lambda kind: kind.__name__)
def test_it_moves_scratch_memory_and_gives_everything_back(kind: type[Connector]) -> None:
    driver = HostDriver(GRANULE)
    with VirtualBuffer(driver, 2 * GRANULE) as cache, VirtualBuffer(driver, 2 * GRANULE) as scratch:
        scratch.commit([(0, 2 * GRANULE)])
        connector = kind("exercised", MemoryWindow(cache.base_address, 2 * GRANULE, "cpu"))
        ctypes.memset(scratch.base_address, 0x5A, GRANULE)
        with connector.exercise(MemoryWindow(scratch.base_address, 2 * GRANULE, "cpu")):
            moved = ctypes.string_at(scratch.base_address + GRANULE, GRANULE)
            assert moved == b"\x5a" * GRANULE
        assert cache.committed == (), "the cache is not touched"
        connector.close()
