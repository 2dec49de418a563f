"""One body for every virtual-memory driver: what VmmDriver promises, seen through tensors.

The drivers of GPUs also run without one, over a stub of the vendor's library. Since that must not
get into this process, the last test here runs this file again in another.
"""

import itertools
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support import vmm_stub

from kvxfer.errors import DriverError, OutOfMemory
from kvxfer.memory.cuda import CudaDriver
from kvxfer.memory.extensible_tensor import tensor_over
from kvxfer.memory.hip import HipDriver
from kvxfer.memory.host import HostDriver

GRANULES = 8


def make_cuda():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return CudaDriver()


def make_over_stub():
    stub = vmm_stub.loaded_stub()
    driver = {"cuda": CudaDriver, "hip": HipDriver}[stub.vendor]()
    driver.device = "cpu"  # the stub's memory is the host's
    return driver


HERE = [
    pytest.param(HostDriver, id="host"),
    pytest.param(make_cuda, id="cuda", marks=pytest.mark.gpu),
]
OVER_STUB = [pytest.param(make_over_stub, id=f"{vmm_stub.VENDOR}-stub")]


@pytest.fixture(params=OVER_STUB if vmm_stub.VENDOR else HERE)
def driver(request):
    yield request.param()
    if vmm_stub.VENDOR:
        assert not any(vmm_stub.loaded_stub().live().values())


class Space:
    """A reservation addressed in granules; whatever is still committed goes at the end."""

    def __init__(self, driver, undo):
        self.driver = driver
        self.granule = driver.granularity
        self.base = driver.reserve(GRANULES * self.granule)
        self.chunks = {}
        undo.callback(driver.free, self.base, GRANULES * self.granule)
        undo.callback(self.release)

    def at(self, granule):
        return self.base + granule * self.granule

    def commit(self, granule, count=1):
        size = count * self.granule
        self.chunks[granule] = (size, self.driver.commit(self.at(granule), size))

    def import_(self, fd, granule, count=1, writable=True):
        size = count * self.granule
        self.chunks[granule] = (size, self.driver.import_(fd, self.at(granule), size, writable))

    def decommit(self, granule):
        size, handle = self.chunks[granule]
        self.driver.decommit(self.at(granule), size, handle)
        del self.chunks[granule]

    def bytes(self, granule, count=1):
        return tensor_over(self.at(granule), count * self.granule, self.driver.device)

    def release(self):
        for granule in list(self.chunks):
            self.decommit(granule)


@pytest.fixture
def undo():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def space(driver, undo):
    return Space(driver, undo)


def holds(tensor, value):
    return bool((tensor == value).all())


def test_granularity_is_a_power_of_two_and_aligns_reservations(driver, undo):
    granule = driver.granularity
    assert granule >= 4096
    assert granule & (granule - 1) == 0
    assert all(Space(driver, undo).base % granule == 0 for _ in range(5))


def test_reservations_do_not_overlap(driver, undo):
    bases = sorted(Space(driver, undo).base for _ in range(5))
    gaps = [right - left for left, right in itertools.pairwise(bases)]
    assert min(gaps) >= GRANULES * driver.granularity


def test_more_addresses_than_memory_can_be_reserved(driver):
    size = -(-4 * driver.memory_info().total_bytes // driver.granularity) * driver.granularity
    driver.free(driver.reserve(size), size)


def test_committed_bytes_are_readable_and_writable_to_both_edges(space):
    space.commit(1, 2)
    memory = space.bytes(1, 2)
    memory.fill_(7)
    memory[0], memory[-1] = 1, 2
    assert memory[[0, 1, -2, -1]].tolist() == [1, 7, 7, 2]


def test_a_neighbour_that_comes_and_goes_leaves_a_chunk_alone(space):
    space.commit(3)
    space.bytes(3).fill_(9)
    for neighbour in (2, 4):
        space.commit(neighbour)
        space.bytes(neighbour).fill_(5)
        space.decommit(neighbour)
    assert holds(space.bytes(3), 9)


def test_adjacent_chunks_form_one_stretch(space):
    space.commit(0, 2)
    space.commit(2, 1)
    whole = space.bytes(0, 3)
    whole.copy_(torch.arange(len(whole), dtype=torch.int64) % 251)
    assert space.bytes(2)[0] == 2 * space.granule % 251


def test_a_decommitted_address_can_be_committed_again(space):
    for count in (1, 3, 2):
        space.commit(2, count)
        space.bytes(2, count).fill_(count)
        assert holds(space.bytes(2, count), count)
        space.decommit(2)


def test_an_imported_chunk_is_the_same_memory(driver, undo, space):
    other = Space(driver, undo)
    space.commit(0, 2)
    fd = driver.export(space.chunks[0][1])
    undo.callback(os.close, fd)
    other.import_(fd, 5, 2)
    os.fstat(fd)  # still the caller's
    space.bytes(0, 2).fill_(3)
    assert holds(other.bytes(5, 2), 3)
    other.bytes(5, 2).fill_(4)
    assert holds(space.bytes(0, 2), 4)


def test_an_imported_chunk_outlives_the_exporter_and_its_descriptor(driver, undo, space):
    other = Space(driver, undo)
    space.commit(0)
    space.bytes(0).fill_(6)
    fd = driver.export(space.chunks[0][1])
    other.import_(fd, 0)
    os.close(fd)
    space.decommit(0)
    space.commit(0)
    space.bytes(0).fill_(1)
    assert holds(other.bytes(0), 6)


def test_an_import_for_reading_only_is_the_same_memory(driver, undo, space):
    other = Space(driver, undo)
    space.commit(0, 2)
    fd = driver.export(space.chunks[0][1], writable=False)
    other.import_(fd, 5, 2, writable=False)
    os.close(fd)
    space.bytes(0, 2).fill_(3)
    assert holds(other.bytes(5, 2), 3)
    other.decommit(5)
    other.commit(5, 2)
    other.bytes(5, 2).fill_(4)
    assert holds(space.bytes(0, 2), 3)


def test_each_export_is_a_descriptor_of_its_own(driver, space):
    space.commit(0)
    first, second = (driver.export(space.chunks[0][1]) for _ in range(2))
    assert first != second
    os.close(first)
    os.close(second)
    space.bytes(0).fill_(8)
    assert holds(space.bytes(0), 8)


def test_a_larger_size_than_was_exported_is_refused(driver, undo, space):
    other = Space(driver, undo)
    space.commit(0)
    fd = driver.export(space.chunks[0][1])
    undo.callback(os.close, fd)
    with pytest.raises(DriverError):
        other.import_(fd, 0, 2)
    other.commit(0, 2)


def test_a_descriptor_that_is_no_chunk_is_refused(driver, undo, space):
    fd = os.open("/dev/null", os.O_RDWR)
    undo.callback(os.close, fd)
    with pytest.raises(DriverError):
        space.import_(fd, 0)
    space.commit(0)


@pytest.mark.parametrize(
    ("start", "size"),
    [(0.5, 1), (0, 0.5), (0, 1.5), (0, 0)],
    ids=["address", "size", "tail", "empty"],
)
def test_what_is_not_aligned_is_refused_and_changes_nothing(driver, space, start, size):
    address = space.base + int(start * space.granule)
    with pytest.raises(DriverError):
        driver.commit(address, int(size * space.granule))
    space.commit(0, GRANULES)


def test_what_is_committed_cannot_be_committed_again(driver, space):
    space.commit(2, 2)
    space.bytes(2, 2).fill_(5)
    for granule, count in ((2, 2), (1, 2), (3, 2), (2, 1)):
        with pytest.raises(DriverError):
            driver.commit(space.at(granule), count * space.granule)
    assert holds(space.bytes(2, 2), 5)
    space.commit(1)
    space.commit(4)


def test_addresses_that_are_not_reserved_cannot_be_committed(driver):
    base = driver.reserve(driver.granularity)
    driver.free(base, driver.granularity)
    with pytest.raises(DriverError):
        driver.commit(base, driver.granularity)


def test_want_of_memory_is_its_own_error_and_leaves_nothing_behind(driver, undo):
    info = driver.memory_info()
    assert 0 < info.free_bytes <= info.total_bytes
    size = -(-2 * info.total_bytes // driver.granularity) * driver.granularity
    base = driver.reserve(size)
    undo.callback(driver.free, base, size)
    with pytest.raises(OutOfMemory) as caught:
        driver.commit(base, size)
    assert caught.value.requested_bytes == size
    assert 0 < caught.value.free_bytes <= info.total_bytes
    handle = driver.commit(base, driver.granularity)
    driver.decommit(base, driver.granularity, handle)


if not vmm_stub.VENDOR:

    @pytest.fixture(scope="module")
    def runs():
        """One process for each vendor, side by side."""
        memory = Path(__file__).parents[1] / "memory"
        cases = [Path(__file__), memory / "gpu_stub_cases.py"]
        vendors = {"cuda": cases, "hip": [*cases, memory / "hip_stub_cases.py"]}
        if torch.cuda.is_available():
            del vendors["cuda"]
        with ExitStack() as stack:
            yield {
                vendor: stack.enter_context(vmm_stub.run_over_stub(vendor, files))
                for vendor, files in vendors.items()
            }

    @pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc compiles the stub")
    @pytest.mark.parametrize("vendor", ["cuda", "hip"])
    def test_all_of_this_holds_over_a_stub_too_and_its_own_cases(vendor, runs):
        if vendor not in runs:
            pytest.skip("this machine has a CUDA driver of its own")
        passed, output = runs[vendor]()
        assert passed, output
