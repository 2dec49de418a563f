"""VirtualBuffer against a set of granules, and with drivers that fail at every step."""

import ctypes

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvxfer.errors import CacheError, CapacityExceeded, DriverError
from kvxfer.memory.chunks import Chunk, chunk_sizes
from kvxfer.memory.host import HostDriver
from kvxfer.memory.steps import finished
from kvxfer.memory.virtual_buffer import VirtualBuffer

G = 4096
GRANULES = 48


class FailingDriver(HostDriver):
    """Real memory, but the commit after `commits_left` more fails; decommits fail while told to."""

    def __init__(self):
        super().__init__(G)
        self.commits_left = None
        self.decommits_left = None

    def commit(self, address, size_bytes):
        self._count_down("commits_left")
        return super().commit(address, size_bytes)

    def decommit(self, address, size_bytes, handle):
        self._count_down("decommits_left")
        super().decommit(address, size_bytes, handle)

    def _count_down(self, name):
        left = getattr(self, name)
        if left == 0:
            raise DriverError(name, 5, "injected")
        if left is not None:
            setattr(self, name, left - 1)


@pytest.fixture
def driver():
    return FailingDriver()


@pytest.fixture
def buffer(driver):
    with VirtualBuffer(driver, GRANULES * G, largest_chunk_bytes=4 * G) as buffer:
        yield buffer


def granules(pairs):
    return {index for start, size in pairs for index in range(start // G, (start + size) // G)}


def test_committed_ranges_are_merged_across_chunks_and_calls(buffer):
    buffer.commit([(0, 6 * G), (10 * G, G)])
    assert buffer.committed == ((0, 6 * G), (10 * G, G))
    buffer.commit([(6 * G, 4 * G)])
    assert buffer.committed == ((0, 11 * G),)


def test_growth_makes_new_tuples_and_keeps_base_and_contents(buffer):
    base = buffer.base_address
    buffer.commit([(0, 2 * G)])
    chunks, committed = buffer.chunks, buffer.committed
    ctypes.memset(base, 77, 2 * G)
    new = buffer.commit([(2 * G, 9 * G)])
    assert (chunks, committed) == (buffer.chunks[:1], ((0, 2 * G),))
    assert buffer.chunks == (*chunks, *new)
    assert buffer.base_address == base
    assert ctypes.string_at(base, 2 * G) == bytes([77]) * (2 * G)


def test_release_physical_keeps_the_addresses(buffer):
    base = buffer.base_address
    buffer.commit([(0, 5 * G), (20 * G, G)])
    buffer.release_physical()
    assert (buffer.chunks, buffer.committed) == ((), ())
    buffer.commit([(0, 5 * G)])
    assert buffer.base_address == base
    assert ctypes.string_at(base, 1) == b"\0"


@pytest.mark.parametrize(
    ("ranges", "error"),
    [
        ([(G, G - 1)], CacheError),
        ([(G // 2, G)], CacheError),
        ([(G, 0)], CacheError),
        ([(G, -G)], CacheError),
        ([(-G, G)], CapacityExceeded),
        ([((GRANULES - 1) * G, 2 * G)], CapacityExceeded),
        ([(4 * G, 2 * G), (5 * G, G)], CacheError),
        ([(4 * G, G), (4 * G, G)], CacheError),
        ([(0, G)], CacheError),
        ([(20 * G, G), (0, 30 * G)], CacheError),
    ],
)
def test_a_bad_range_is_refused_and_the_good_ones_beside_it_too(buffer, snapshot, ranges, error):
    buffer.commit([(0, 2 * G)])
    before = snapshot(buffer)
    with pytest.raises(error):
        buffer.commit([(40 * G, G), *ranges])
    assert snapshot(buffer) == before


def test_a_commit_that_fails_at_any_step_changes_nothing(buffer, driver, snapshot):
    buffer.commit([(0, 2 * G)])
    ranges = [(3 * G, 7 * G), (12 * G, G), (20 * G, 13 * G)]
    steps = sum(len(chunk_sizes(size, G, 4 * G)) for _, size in ranges)
    before = snapshot(buffer)
    for step in range(steps):
        driver.commits_left = step
        with pytest.raises(DriverError, match="injected"):
            buffer.commit(ranges)
        assert snapshot(buffer) == before
    driver.commits_left = steps
    assert len(buffer.commit(ranges)) == steps


def test_a_commit_that_is_given_up_after_any_step_changes_nothing(buffer, snapshot):
    buffer.commit([(0, 2 * G)])
    before = snapshot(buffer)
    for taken in range(4):
        steps = buffer.committing([(3 * G, 13 * G)])
        for _ in range(taken):
            next(steps)
        steps.close()
        assert snapshot(buffer) == before


def test_what_is_there_may_be_used_and_released_while_more_is_committed(buffer):
    first = buffer.commit([(0, 2 * G)])
    steps = buffer.committing([(4 * G, 8 * G)])
    next(steps)
    assert buffer.chunks == first
    buffer.decommit(first)
    new = finished(steps)
    assert buffer.chunks == new
    assert buffer.committed == ((4 * G, 8 * G),)


def test_what_cannot_be_undone_keeps_its_owner(buffer, driver):
    driver.commits_left, driver.decommits_left = 4, 2
    with pytest.raises(DriverError):
        buffer.commit([(0, 20 * G)])
    assert [chunk.offset // G for chunk in buffer.chunks] == [0, 4]
    driver.commits_left = driver.decommits_left = None
    buffer.release_physical()


def test_a_decommit_that_fails_half_way_lists_what_is_left(buffer, driver):
    chunks = buffer.commit([(0, 16 * G)])
    driver.decommits_left = 2
    with pytest.raises(DriverError):
        buffer.decommit(chunks)
    assert buffer.chunks == chunks[2:]
    assert buffer.committed == ((8 * G, 8 * G),)
    driver.decommits_left = None


@pytest.mark.parametrize("pick", ["foreign", "twice", "gone"])
def test_only_own_chunks_are_decommitted(buffer, snapshot, pick):
    gone, first, second = buffer.commit([(0, 12 * G)])
    buffer.decommit([gone])
    foreign = Chunk(first.offset, first.size, second.handle)
    before = snapshot(buffer)
    bad = {"foreign": foreign, "twice": first, "gone": gone}[pick]
    with pytest.raises(CacheError):
        buffer.decommit([first, bad])
    assert snapshot(buffer) == before


def test_after_close_every_call_is_a_typed_error(driver):
    buffer = VirtualBuffer(driver, 8 * G)
    (chunk,) = buffer.commit([(0, G)])
    buffer.close()
    buffer.close()
    assert (buffer.chunks, buffer.committed) == ((), ())
    calls = [
        lambda: buffer.base_address,
        lambda: buffer.commit([(0, G)]),
        lambda: buffer.commit([]),
        lambda: buffer.decommit([chunk]),
        lambda: buffer.decommit([]),
        buffer.release_physical,
        lambda: buffer.export(chunk),
    ]
    for call in calls:
        with pytest.raises(CacheError, match="closed"):
            call()


def test_close_leaves_no_mapping(driver, mapped):
    buffer = VirtualBuffer(driver, 1 << 34)
    base = buffer.base_address
    buffer.commit([(0, G), (1 << 33, 3 * G)])
    buffer.close()
    assert not mapped(base, base + (1 << 34))


def test_a_close_that_fails_can_be_repeated(driver):
    buffer = VirtualBuffer(driver, 8 * G, largest_chunk_bytes=G)
    buffer.commit([(0, 3 * G)])
    driver.decommits_left = 1
    with pytest.raises(DriverError):
        buffer.close()
    assert len(buffer.chunks) == 2
    driver.decommits_left = None
    buffer.close()


@pytest.mark.parametrize("size", [0, -G, G + 1])
def test_a_size_that_is_not_whole_granules_is_refused(driver, size):
    with pytest.raises(CacheError):
        VirtualBuffer(driver, size)


RANGES = st.lists(
    st.tuples(st.integers(0, GRANULES), st.integers(1, 12)), min_size=1, max_size=4
).map(lambda pairs: [(start * G, count * G) for start, count in pairs])


class BufferModel(RuleBasedStateMachine):
    """The model: which granules are committed, and the byte that each was filled with."""

    @initialize()
    def start(self):
        self.driver = FailingDriver()
        self.buffer = VirtualBuffer(self.driver, GRANULES * G, largest_chunk_bytes=4 * G)
        self.base = self.buffer.base_address
        self.content = {}
        self.stamp = 0

    @rule(ranges=RANGES)
    def commit(self, ranges):
        wanted = granules(ranges)
        disjoint = len(wanted) == sum(size // G for _, size in ranges)
        if not disjoint or wanted & self.content.keys() or max(wanted) >= GRANULES:
            with pytest.raises(CacheError):
                self.buffer.commit(ranges)
            return
        chunks = self.buffer.commit(ranges)
        assert granules((chunk.offset, chunk.size) for chunk in chunks) == wanted
        for index in wanted:
            assert self.read(index) == {0}
            self.write(index)

    @rule(ranges=RANGES, commits=st.integers(0, 6))
    def commit_with_a_fault(self, ranges, commits):
        self.driver.commits_left = commits
        try:
            self.buffer.commit(ranges)
        except (DriverError, CacheError):
            pass
        else:
            self.content |= dict.fromkeys(granules(ranges), 0)
        self.driver.commits_left = None

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def decommit(self, data):
        chunks = data.draw(st.lists(st.sampled_from(self.buffer.chunks), unique=True))
        self.buffer.decommit(chunks)
        for index in granules((chunk.offset, chunk.size) for chunk in chunks):
            del self.content[index]

    @rule()
    def release(self):
        self.buffer.release_physical()
        self.content = {}

    @invariant()
    def agrees(self):
        chunks = self.buffer.chunks
        covered = [i for chunk in chunks for i in range(chunk.offset // G, chunk.end // G)]
        assert covered == sorted(self.content)
        ends = [offset + size for offset, size in self.buffer.committed]
        starts = [offset for offset, _ in self.buffer.committed]
        assert granules(self.buffer.committed) == set(covered)
        assert all(end < start for end, start in zip(ends, starts[1:], strict=False))
        assert self.buffer.base_address == self.base
        assert all(self.read(index) == {byte} for index, byte in self.content.items())

    def read(self, index):
        return set(ctypes.string_at(self.base + index * G, G))

    def write(self, index):
        self.stamp = self.stamp % 255 + 1
        ctypes.memset(self.base + index * G, self.stamp, G)
        self.content[index] = self.stamp

    def teardown(self):
        if hasattr(self, "buffer"):
            self.buffer.close()


BufferModel.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestBufferModel = BufferModel.TestCase
