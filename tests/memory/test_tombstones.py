"""Addresses that lost their memory and still do not fault, and chunks that become one."""

import ctypes

import pytest
from support.children import run_in_child
from support.fixtures import num_open_files

from kvxfer.errors import CacheError, DriverError, MemoryPinned
from kvxfer.memory.chunks import Chunk
from kvxfer.memory.host import HostDriver
from kvxfer.memory.ranges import Range
from kvxfer.memory.virtual_buffer import VirtualBuffer

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


# --- where the driver has none: chunks that stay, pinned ------------------------------------------


@pytest.fixture
def pinning(buffer, monkeypatch):
    monkeypatch.setattr(HostDriver, "can_retire", False)
    return buffer


def test_what_is_pinned_stays_as_it_was_and_is_nobodys(pinning):
    chunks = [*pinning.commit([(0, PAGE)]), *pinning.commit([(PAGE, PAGE)])]
    base, files = pinning.base_address, num_open_files()
    ctypes.memset(base, 1, 2 * PAGE)
    pinning.retire(chunks[1:])
    assert (pinning.pinned, pinning.tombstones) == ((chunks[1],), ())
    assert pinning.chunks == (chunks[0],)
    assert pinning.committed == (Range(0, PAGE),)
    assert num_open_files() == files, "the memory is still held"
    assert ctypes.string_at(base, 2 * PAGE) == b"\1" * 2 * PAGE
    ctypes.memset(base + PAGE, 9, PAGE)  # the stale write
    assert ctypes.string_at(base + PAGE, PAGE) == b"\11" * PAGE
    for use in (pinning.decommit, pinning.retire):
        with pytest.raises(CacheError, match="no chunk of this buffer"):
            use([chunks[1]])
    with pytest.raises(CacheError, match="no chunk of this buffer"):
        pinning.merge(chunks, copy)
    with pytest.raises(CacheError, match="no chunk of this buffer"):
        pinning.export(chunks[1])
    assert pinning.pinned == (chunks[1],)


@pytest.mark.parametrize(("offset", "pages"), [(4, 2), (3, 2), (5, 2), (4, 1), (3, 4), (0, 10)])
def test_nothing_is_committed_over_what_is_pinned(pinning, offset, pages):
    (chunk,) = pinning.commit([(4 * PAGE, 2 * PAGE)])
    pinning.retire([chunk])
    files = num_open_files()
    with pytest.raises(MemoryPinned, match="a lost peer may still reach"):
        pinning.commit([(10 * PAGE, PAGE), (offset * PAGE, pages * PAGE)])
    assert (pinning.chunks, pinning.pinned, num_open_files()) == ((), (chunk,), files)


def test_beside_what_is_pinned_there_is_room(pinning):
    (chunk,) = pinning.commit([(4 * PAGE, 2 * PAGE)])
    pinning.retire([chunk])
    below, above = pinning.commit([(3 * PAGE, PAGE), (6 * PAGE, PAGE)])
    assert pinning.chunks == (below, above)
    assert pinning.committed == (Range(3 * PAGE, PAGE), Range(6 * PAGE, PAGE))


def test_burying_releases_what_is_pinned(pinning):
    files = num_open_files()
    chunks = pinning.commit([(0, 2 * PAGE), (8 * PAGE, PAGE)])
    pinning.retire(chunks)
    assert pinning.pinned == chunks
    assert not faults(pinning.base_address)
    pinning.bury()
    pinning.bury()
    assert (pinning.pinned, num_open_files()) == ((), files)
    assert faults(pinning.base_address)
    assert faults(pinning.base_address + 8 * PAGE)
    pinning.commit([(0, 2 * PAGE)])
    assert ctypes.string_at(pinning.base_address, 4) == bytes(4)


def test_a_burial_that_the_driver_refuses_can_be_repeated(pinning, monkeypatch):
    chunks = [*pinning.commit([(0, PAGE)]), *pinning.commit([(2 * PAGE, PAGE)])]
    pinning.retire(chunks)
    refusals = [chunks[1].offset + pinning.base_address]
    release = HostDriver.decommit

    def decommit(self, address, size_bytes, handle):
        if address in refusals:
            refusals.remove(address)
            raise DriverError("decommit", 5, "refused")
        release(self, address, size_bytes, handle)

    monkeypatch.setattr(HostDriver, "decommit", decommit)
    with pytest.raises(DriverError, match="refused"):
        pinning.bury()
    assert pinning.pinned == (chunks[1],)
    pinning.bury()
    assert pinning.pinned == ()


def test_close_leaves_nothing_of_what_is_pinned(monkeypatch):
    monkeypatch.setattr(HostDriver, "can_retire", False)
    files = num_open_files()
    buffer = VirtualBuffer(HostDriver(PAGE), 16 * PAGE)
    base = buffer.base_address
    buffer.retire(buffer.commit([(0, 3 * PAGE)])[:1])
    buffer.commit([(8 * PAGE, PAGE)])
    buffer.close()
    buffer.close()
    assert (num_open_files(), buffer.pinned, buffer.chunks) == (files, (), ())
    assert faults(base)
