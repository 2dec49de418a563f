"""The GPU drivers' own promises, over a stub of the vendor's library.

Not collected by itself: tests/contracts/test_vmm_driver.py runs it in a process with the stub.
"""

import ctypes
import os
import threading
from collections import Counter
from contextlib import ExitStack

import pytest
from support import vmm_stub

from kvxfer.errors import DriverError, OutOfMemory
from kvxfer.memory.cuda import CudaDriver
from kvxfer.memory.gpu import KINDS
from kvxfer.memory.hip import HipDriver
from kvxfer.memory.virtual_buffer import VirtualBuffer

MIB = 1 << 20
G = 2 * MIB
GRANULES = 24
DEVICE = 1
STUB = vmm_stub.loaded_stub()
DRIVER = {"cuda": CudaDriver, "hip": HipDriver}[STUB.vendor]


def entry(suffix):
    """cuMemMap or hipMemMap."""
    return STUB.prefix + suffix


@pytest.fixture(autouse=True)
def nothing_is_left(conserved):
    STUB.reset()
    yield
    assert not any(STUB.live().values())
    STUB.reset()


@pytest.fixture
def driver():
    return DRIVER(DEVICE)


@pytest.fixture
def buffer(driver):
    with VirtualBuffer(driver, GRANULES * G, largest_chunk_bytes=4 * G) as buffer:
        yield buffer


def sole(buffer):
    (chunk,) = buffer.commit([(8 * G, 2 * G)])
    ctypes.memset(buffer.base_address + chunk.offset, 77, chunk.size)
    return chunk


def reserve(buffer, driver, undo):
    base = driver.reserve(3 * G)
    undo.callback(driver.free, base, 3 * G)


def commit(buffer, driver, undo):
    chunks = buffer.commit([(0, 7 * G), (12 * G, G)])
    assert [chunk.size // G for chunk in chunks] == [4, 2, 1, 1]
    undo.callback(buffer.decommit, chunks)


def decommit(buffer, driver, undo):
    (chunk,) = buffer.chunks
    buffer.decommit([chunk])
    undo.callback(sole, buffer)


def export(buffer, driver, undo):
    undo.callback(os.close, buffer.export(buffer.chunks[0]))


def import_(buffer, driver, undo):
    address, size = buffer.base_address + 16 * G, buffer.chunks[0].size
    with os.fdopen(os.memfd_create("peer"), "r+b") as peer:
        peer.truncate(size)
        handle = driver.import_(peer.fileno(), address, size)
    undo.callback(driver.decommit, address, size, handle)


def import_for_reading(buffer, driver, undo):
    chunk = buffer.chunks[0]
    address = buffer.base_address + 16 * G
    fd = buffer.export(chunk, writable=False)
    undo.callback(os.close, fd)
    handle = driver.import_(fd, address, chunk.size, writable=False)
    undo.callback(driver.decommit, address, chunk.size, handle)


def memory_info(buffer, driver, undo):
    driver.memory_info()


OPERATIONS = [reserve, commit, decommit, export, import_, import_for_reading, memory_info]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_whichever_call_fails_things_are_as_before(operation, driver, buffer, snapshot):
    chunk = sole(buffer)
    address = buffer.base_address + chunk.offset

    def state():
        free = driver.memory_info().free_bytes
        content = ctypes.string_at(address, chunk.size)
        return snapshot(buffer)[1:], STUB.live(), free, content == bytes([77]) * chunk.size

    def calls():
        """Every call of the operation, as (entry point, how manieth of its kind)."""
        with ExitStack() as undo:
            STUB.reset()
            operation(buffer, driver, undo)
            names = STUB.log()
        return [(name, names[:end].count(name)) for end, name in enumerate(names, 1)]

    before, faults = state(), calls()
    assert faults and state() == before
    for name, nth in faults:
        chunks = buffer.chunks
        with ExitStack() as undo, STUB.failing(name, nth), pytest.raises(DriverError) as caught:
            operation(buffer, driver, undo)
        assert (caught.value.call, caught.value.code) == (name, 999)
        assert (state(), buffer.chunks) == (before, chunks)
        assert [name for name, _ in calls()] == [name for name, _ in faults]


def test_freeing_that_fails_can_be_repeated(driver):
    base = driver.reserve(3 * G)
    with STUB.failing(entry("MemAddressFree")), pytest.raises(DriverError):
        driver.free(base, 3 * G)
    driver.free(base, 3 * G)


def test_whichever_call_fails_a_driver_is_whole_or_not_made():
    STUB.reset()
    best = DRIVER(DEVICE)
    calls = Counter(STUB.log())
    outcomes = Counter()
    faults = [(name, nth) for name, count in calls.items() for nth in range(1, count + 1)]
    for name, nth in faults:
        with STUB.failing(name, nth):
            try:
                driver = DRIVER(DEVICE)
            except DriverError as error:
                assert (error.call, error.code) == (name, 999)
                outcomes["refused"] += 1
                if name == entry("MemRelease"):  # the one failure that nothing can mend
                    best._calls.release(STUB.last_handle())
                assert not any(STUB.live().values())
                continue
        with VirtualBuffer(driver, 8 * G) as buffer:
            buffer.commit([(0, 8 * G)])
        step = KINDS.index(driver.kind) - KINDS.index(best.kind)
        assert step in (0, 1)  # 0: it struck a kind that is not to be had anyway
        outcomes["lesser"] += step
    # Granularity, allocation and export of a kind: what refuses one of them gets the next kind.
    assert outcomes["lesser"] >= 3 and outcomes["refused"] >= 5, outcomes


def permissions(mapped, address):
    ((_, _, found, _),) = mapped(address, address + G)
    return found[:2]


def test_what_is_imported_for_reading_stays_so_when_unmapping_fails(driver, buffer, mapped):
    chunk = sole(buffer)
    address = buffer.base_address + 16 * G
    fd = buffer.export(chunk)
    handle = driver.import_(fd, address, chunk.size, writable=False)
    assert permissions(mapped, address) == "r-"
    with STUB.failing(entry("MemRelease")), pytest.raises(DriverError):
        driver.decommit(address, chunk.size, handle)
    assert permissions(mapped, address) == "r-"
    driver.decommit(address, chunk.size, handle)
    handle = driver.import_(fd, address, chunk.size)
    os.close(fd)
    with STUB.failing(entry("MemRelease")), pytest.raises(DriverError):
        driver.decommit(address, chunk.size, handle)
    assert permissions(mapped, address) == "rw"
    driver.decommit(address, chunk.size, handle)


def test_a_device_that_cannot_map_for_reading_only_says_so_once(
    driver, buffer, mapped, monkeypatch
):
    monkeypatch.setenv("STUB_READ_ONLY", "0")
    sole(buffer)
    address = buffer.base_address + 16 * G
    told = len(driver.refused)
    for attempts in (2, 1):
        with ExitStack() as undo:
            STUB.reset()
            import_for_reading(buffer, driver, undo)
            assert permissions(mapped, address) == "rw"
            assert STUB.log().count(entry("MemSetAccess")) == attempts
    (reason,) = driver.refused[told:]
    assert reason.startswith(f"mappings for reading only: {entry('MemSetAccess')}")


def test_want_of_memory_half_way_says_how_much_and_leaves_nothing(driver, buffer, monkeypatch):
    monkeypatch.setenv("STUB_MEMORY_BYTES", str(9 * G))
    chunk = sole(buffer)
    with pytest.raises(OutOfMemory) as caught:
        buffer.commit([(0, 4 * G), (12 * G, 4 * G)])
    assert caught.value.call == entry("MemCreate")
    assert (caught.value.requested_bytes, caught.value.free_bytes) == (4 * G, 3 * G)
    assert buffer.chunks == (chunk,)
    assert STUB.live()["allocations"] == 1
    assert driver.memory_info().free_bytes == 7 * G
    buffer.commit([(0, 7 * G)])


def test_a_full_device_is_want_of_memory_at_construction_too(monkeypatch):
    monkeypatch.setenv("STUB_MEMORY_BYTES", str(MIB))
    with pytest.raises(OutOfMemory):
        DRIVER(DEVICE)


def test_the_device_is_synchronised_before_anything_is_unmapped(buffer):
    chunk = sole(buffer)
    STUB.reset()
    buffer.decommit([chunk])
    wait = {"cuda": "cuCtxSynchronize", "hip": "hipDeviceSynchronize"}[STUB.vendor]
    order = [wait, entry("MemUnmap"), entry("MemRelease")]
    assert [name for name in STUB.log() if name in order] == order


BOTH, FD, NONE = "FABRIC|POSIX_FD", "POSIX_FD", "NONE"


@pytest.mark.parametrize(
    ("types", "direct", "kind"),
    [(9, 1, BOTH), (9, 0, BOTH), (1, 1, FD), (1, 0, FD), (8, 1, NONE), (0, 1, NONE), (0, 0, NONE)],
)
def test_the_most_capable_kind_that_can_be_had_is_taken(monkeypatch, types, direct, kind):
    monkeypatch.setenv("STUB_HANDLE_TYPES", str(types))
    monkeypatch.setenv("STUB_GPU_DIRECT", str(direct))
    kind = FD if STUB.vendor == "hip" and kind == BOTH else kind
    driver = DRIVER(DEVICE)
    assert set(driver.kind.handle_types.name.split("|")) == set(kind.split("|"))
    assert driver.gpu_direct == bool(direct)
    assert len(driver.refused) == KINDS.index(driver.kind)
    assert all(entry("MemCreate") in reason for reason in driver.refused)
    with VirtualBuffer(driver, 4 * G) as buffer:
        (chunk,) = buffer.commit([(0, 4 * G)])
        if driver.can_export:
            os.close(buffer.export(chunk))
        else:
            with pytest.raises(DriverError, match="cannot be exported"):
                buffer.export(chunk)


def test_a_device_that_gives_nothing_says_why_for_each_kind():
    with STUB.failing(entry("MemCreate"), nth=0, code=801), pytest.raises(DriverError) as caught:
        DRIVER(DEVICE)
    assert all(f"{kind}: {entry('MemCreate')}" in str(caught.value) for kind in KINDS)


def test_a_device_that_is_not_there_is_a_typed_error():
    with pytest.raises(DriverError, match=r"INVALID_DEVICE|InvalidDevice"):
        DRIVER(7)


def test_an_error_has_the_call_the_code_and_its_text(driver):
    with STUB.failing(entry("MemAddressReserve"), code=801), pytest.raises(DriverError) as caught:
        driver.reserve(G)
    assert (caught.value.call, caught.value.code) == (entry("MemAddressReserve"), 801)
    symbol = {"cuda": "CUDA_ERROR_NOT_SUPPORTED", "hip": "hipErrorNotSupported"}[STUB.vendor]
    assert caught.value.text == f"{symbol}: stub text"


def test_a_code_that_nobody_knows_is_a_typed_error(driver):
    with STUB.failing(entry("MemAddressReserve"), code=7777), pytest.raises(DriverError) as caught:
        driver.reserve(G)
    assert caught.value.call == entry("MemAddressReserve")
    assert "7777" in str(caught.value)


def test_any_thread_may_call_and_keeps_its_device(driver, buffer):
    outcome = []

    def body():
        before = STUB.current_device()
        buffer.commit([(0, 3 * G)])
        buffer.release_physical()
        outcome.append((before, STUB.current_device()))

    for _ in range(2):
        thread = threading.Thread(target=body)
        thread.start()
        thread.join(30)
    bare = {"cuda": -1, "hip": 0}[STUB.vendor]
    assert outcome == [(bare, bare)] * 2


def test_the_stub_is_as_strict_as_the_cases_above_need(driver, buffer):
    chunk = sole(buffer)
    address = buffer.base_address + chunk.offset
    with pytest.raises(DriverError, match="MemUnmap"):
        driver.decommit(address, G, chunk.handle)
    with pytest.raises(DriverError, match="MemAddressFree"):
        driver.free(buffer.base_address, buffer.size_bytes)
    other = DRIVER(0)
    handle = other.commit(buffer.base_address, G)
    with pytest.raises(DriverError, match="MemSetAccess"):
        driver._calls.set_access(
            buffer.base_address, G, True
        )  # device 1 has no access to device 0's
    other.decommit(buffer.base_address, G, handle)
    with pytest.raises(DriverError, match="MemRelease"):
        driver._calls.release(handle)
