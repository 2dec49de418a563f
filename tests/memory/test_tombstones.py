"""Addresses that lost their memory and still do not fault, and chunks that become one."""

import ctypes

import pytest
from support.children import run_in_child
from support.fixtures import num_open_files

from kvxfer.errors import CacheError, DriverError
from kvxfer.memory.host import HostDriver
from kvxfer.memory.ranges import Range
from kvxfer.memory.virtual_buffer import Chunk, VirtualBuffer

PAGE = 4096


@pytest.fixture
def buffer():
    files = num_open_files()
    with VirtualBuffer(HostDriver(PAGE), 16 * PAGE) as made:
        yield made
    assert num_open_files() == files


def copy(target, source, size_bytes):
    ctypes.memmove(target, source, size_bytes)


def faults(address):
    return run_in_child(lambda: ctypes.string_at(address, 1)) == -11


def test_a_retired_range_takes_writes_and_forgets_them(buffer):
    chunks = [*buffer.commit([(0, PAGE)]), *buffer.commit([(PAGE, PAGE)])]
    base, files = buffer.base_address, num_open_files()
    ctypes.memset(base, 1, 2 * PAGE)
    buffer.retire(chunks[1:])
    assert num_open_files() == files - 1
    assert buffer.tombstones == (Range(PAGE, PAGE),)
    assert buffer.committed == (Range(0, PAGE),)
    assert ctypes.string_at(base + PAGE, 4) == bytes(4)
    ctypes.memset(base + PAGE, 9, PAGE)
    buffer.commit([(PAGE, PAGE)])
    assert ctypes.string_at(base, 2 * PAGE) == b"\1" * PAGE + bytes(PAGE)
    assert buffer.tombstones == ()


def test_buried_it_faults(buffer):
    buffer.retire(buffer.commit([(0, 2 * PAGE)]))
    assert not faults(buffer.base_address)
    buffer.bury()
    buffer.bury()
    assert faults(buffer.base_address)


def test_only_a_whole_chunk_is_retired_and_only_what_is_vacant_is_buried(buffer):
    (chunk,) = buffer.commit([(0, 2 * PAGE)])
    driver, address = buffer._driver, buffer.base_address
    with pytest.raises(DriverError, match="no chunk with handle"):
        driver.retire(address, PAGE, chunk.handle)
    with pytest.raises(DriverError, match="committed already"):
        driver.bury(address, 2 * PAGE)
    with pytest.raises(CacheError, match="no chunk of this buffer"):
        buffer.retire([Chunk(0, PAGE, chunk.handle)])
    assert buffer.chunks == (chunk,)
    assert buffer.tombstones == ()


def test_merged_chunks_hold_what_they_held(buffer):
    chunks = [buffer.commit([(index * PAGE, PAGE)])[0] for index in range(4)]
    for index in range(4):
        ctypes.memset(buffer.base_address + index * PAGE, index + 1, PAGE)
    merged = buffer.merge(chunks[1:3], copy)
    assert (merged.offset, merged.size) == (PAGE, 2 * PAGE)
    assert buffer.chunks == (chunks[0], merged, chunks[3])
    found = ctypes.string_at(buffer.base_address, 4 * PAGE)
    assert found == b"".join(bytes([index + 1]) * PAGE for index in range(4))
    buffer.decommit([merged])
    assert faults(buffer.base_address + PAGE)


def test_only_neighbours_are_merged(buffer):
    chunks = [buffer.commit([(index * PAGE, PAGE)])[0] for index in (0, 2, 3)]
    for wrong in ([], chunks, chunks[:2], [chunks[1], chunks[1]]):
        with pytest.raises(CacheError, match="neighbouring"):
            buffer.merge(wrong, copy)
    with pytest.raises(CacheError, match="no chunk"):
        buffer.merge([Chunk(PAGE, PAGE, chunks[0].handle)], copy)
    assert list(buffer.chunks) == chunks
