"""The thread that owns connector and memory: moves, and growth that is all or nothing."""

import time

import msgspec
import pytest
from support.fixtures import num_open_files
from support.workers import make_engine, make_options

from kvxfer.control.facts import RankFacts
from kvxfer.errors import ConnectorError, OutOfMemory
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.plan import CacheSide, plan_transfer
from kvxfer.transfer.rank_plans import RankMove
from kvxfer.transfer.regions import Region, RegionSet
from kvxfer.worker.mailbox import Mailbox
from kvxfer.worker.stats import add_movement
from kvxfer.worker.transfer_thread import Movement, TransferThread

PUSH = Lane("loopback", Direction.PUSH)


class Side:
    """An engine and its transfer thread; the test is the control thread."""

    def __init__(self, name, **engine):
        self.name = name
        self.engine = make_engine(make_options("prefill", worker_id=name), "1", **engine)
        self.reports = Mailbox()
        self.thread = TransferThread(self.engine.transfer, self.reports)
        self.thread.start()
        self.regions = RegionSet()

    def until(self, condition):
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            for report in self.reports.drain():
                report()
            time.sleep(0.001)

    def grow(self, num_blocks):
        """The Growth, or the error's type. (Kept, an error keeps its traceback's frames alive.)"""
        result = []
        self.thread.grow([num_blocks], result.append, lambda error: result.append(type(error)))
        self.until(lambda: bool(result))
        return result[0]

    def registered(self):
        return set(self.engine.connector.connectors["loopback"]._regions.regions)

    def committed(self):
        return {Region(chunk.offset, chunk.size) for chunk in self.engine.cache.buffer.chunks}

    def close(self):
        self.engine.connector.connectors["loopback"].moving.set()
        self.thread.close_connector()
        assert self.thread.stop(5.0)
        self.engine.connector.close()
        self.reports.close()
        self.engine.close()


@pytest.fixture
def make_side():
    files, made = num_open_files(), []

    def make(name="left", **engine):
        made.append(Side(name, **engine))
        return made[-1]

    yield make
    for side in made:
        side.close()
    assert num_open_files() == files


@pytest.fixture
def pair(make_side):
    left, right = make_side("left", layout="LHBNC"), make_side("right", layout="BLHNC")
    for side, other in ((left, right), (right, left)):
        growth = other.grow(16)
        other.regions = RegionSet().add(growth.regions)
        connected = []
        side.thread.connect(
            other.name,
            [RankFacts(other.engine.cache.buffer.base_address, growth.descriptions[0], [])],
            lambda _, done=connected: done.append(True),
            connected.append,
        )
        side.until(lambda done=connected: bool(done))
        assert connected == [True]
    return left, right


def plan_between(source, target, blocks=(1, 5, 3)):
    return plan_transfer(
        CacheSide(source.engine.cache.geometry.groups[0], source.regions, blocks),
        CacheSide(target.engine.cache.geometry.groups[0], target.regions, blocks),
        range(4 * len(blocks)),
    )


def test_the_first_growth_registers_what_warm_up_committed_too(make_side):
    side = make_side()
    assert side.registered() == set()
    growth = side.grow(16)
    assert set(growth.regions) == side.registered() == side.committed()
    assert growth.extension.new_blocks[0] == side.engine.cache.committed_blocks[0] >= 16


def test_each_growth_tells_just_what_it_added(make_side):
    side = make_side()
    known = set()
    for num_blocks in (8, 9, 24, 64):
        growth = side.grow(num_blocks)
        assert not known.intersection(growth.regions)
        known.update(growth.regions)
        assert side.registered() == side.committed() == known
        assert growth.extension.new_blocks[0] >= num_blocks
    assert side.engine.cache.committed_blocks[0] == 64


@pytest.mark.parametrize("step", ["register", "describe"])
def test_a_failed_registration_rolls_the_commit_back(make_side, step):
    side = make_side()
    side.grow(8)
    before = side.committed(), side.engine.cache.committed_blocks[0], num_open_files()
    side.engine.connector.connectors["loopback"].refuse.add(step)
    assert side.grow(32) is ConnectorError
    assert (side.committed(), side.engine.cache.committed_blocks[0], num_open_files()) == before
    assert side.registered() == side.committed()
    side.engine.connector.connectors["loopback"].refuse.clear()
    assert side.grow(32).extension.old_blocks[0] == before[1]
    assert side.registered() == side.committed()


def test_a_failed_commit_registers_nothing(make_side):
    side = make_side(layout="LHBNC")
    side.grow(8)
    before = side.committed()
    side.engine.driver.fail_after = 2
    assert side.grow(40) is OutOfMemory
    side.engine.driver.fail_after = -1
    assert side.registered() == side.committed() == before


def test_registered_is_part_of_committed_while_it_grows(make_side):
    side = make_side(capacity=256)
    side.grow(4)
    results = []
    for num_blocks in range(8, 256, 8):
        side.thread.grow([num_blocks], results.append, results.append)
    while len(results) < 31:
        registered = side.registered()  # read first: committed only ever grows here
        assert registered <= side.committed()
        for report in side.reports.drain():
            report()
        time.sleep(0.0005)
    assert side.registered() == side.committed()


@pytest.mark.parametrize("direction", Direction)
def test_a_move_ends_once_with_its_account(pair, direction):
    left, right = pair
    source, target = (left, right) if direction is Direction.PUSH else (right, left)
    for layer, view in enumerate(source.engine.cache.views[0]):
        view[[1, 5, 3]] = 0.5 + layer
    plan, ended = plan_between(source, target), []
    left.thread.move("right", Lane("loopback", direction), plan, ended.append)
    left.until(lambda: bool(ended))
    time.sleep(0.03)
    left.until(lambda: True)
    (movement,) = ended
    assert movement.error is None
    assert movement.num_bytes == plan.total_bytes
    assert movement.num_runs == sum(box.num_runs for box in plan.boxes)
    assert 0 < movement.start_ns < movement.end_ns
    for layer, view in enumerate(target.engine.cache.views[0]):
        assert (view[[1, 5, 3]] == 0.5 + layer).all()


@pytest.mark.parametrize("reason", ["refused", "stranger", "disconnected"])
def test_a_move_that_cannot_be_ends_once_too(pair, reason):
    left, right = pair
    plan, ended = plan_between(left, right), []
    if reason == "refused":
        left.engine.connector.connectors["loopback"].refuse.add("submit")
    if reason == "disconnected":
        left.engine.connector.connectors["loopback"].moving.clear()
    left.thread.move("nobody" if reason == "stranger" else "right", PUSH, plan, ended.append)
    if reason == "disconnected":
        left.thread.disconnect("right", lambda error: None)
        left.until(lambda: not left.engine.connector.connectors["loopback"]._peers)
        left.engine.connector.connectors["loopback"].moving.set()
    left.until(lambda: bool(ended))
    time.sleep(0.03)
    left.until(lambda: True)
    (movement,) = ended
    assert movement.error
    assert movement.num_bytes == plan.total_bytes


def test_moves_in_flight_survive_growth(pair):
    left, right = pair
    left.engine.connector.connectors["loopback"].moving.clear()
    ended = []
    left.thread.move("right", PUSH, plan_between(left, right), ended.append)
    left.grow(48)
    right.grow(48)
    assert ended == []
    left.engine.connector.connectors["loopback"].moving.set()
    left.until(lambda: bool(ended))
    assert ended[0].error is None


def test_moves_go_on_while_memory_is_committed(pair, monkeypatch):
    """However long that takes: those that begin meanwhile end before it does."""
    left, right = pair
    commit, order, count = left.engine.driver.commit, [], []

    def slow(address, size_bytes):
        time.sleep(0.02)
        count.append(size_bytes)
        return commit(address, size_bytes)

    monkeypatch.setattr(left.engine.driver, "commit", slow)
    before = left.committed()
    left.thread.grow([64], lambda growth: order.append("grown"), order.append)
    for number in range(3):
        left.until(lambda n=number: len(count) > n)
        left.thread.move("right", PUSH, plan_between(left, right), order.append)
        left.until(lambda n=number: len(order) > n)
    left.until(lambda: "grown" in order)
    assert order.index("grown") == 3
    assert [one.error for one in order[:3]] == [None] * 3
    assert len(count) == len(left.committed() - before) > 3


def test_a_growth_that_is_under_way_when_the_worker_ends_is_undone(make_side, monkeypatch):
    side = make_side(layout="LHBNC")
    side.grow(8)
    commit, count, failed = side.engine.driver.commit, [], []

    def slow(address, size_bytes):
        time.sleep(0.01)
        count.append(size_bytes)
        return commit(address, size_bytes)

    monkeypatch.setattr(side.engine.driver, "commit", slow)
    before = side.committed()
    side.thread.grow([40], failed.append, lambda error: failed.append(str(error)))
    side.until(lambda: len(count) > 2)
    side.thread.close_connector()
    assert side.thread.stop(5.0)
    side.until(lambda: bool(failed))
    assert "closed" in failed[0] or "the worker ends" in failed[0]
    assert side.committed() == before


def test_a_damaged_description_is_told_and_harms_nothing(pair):
    left, right = pair
    told, ended = [], []
    scribble = msgspec.msgpack.encode({"loopback": b"nonsense"})
    ranks = [RankFacts(0, scribble, [])]
    left.thread.connect("right", ranks, told.append, lambda e: told.append(str(e)))
    left.until(lambda: bool(told))
    assert "shorter than its header" in told[0]
    left.thread.move("right", PUSH, plan_between(left, right), ended.append)
    left.until(lambda: bool(ended))
    assert ended[0].error is None


def test_a_connector_that_would_not_close_is_told(make_side, caplog):
    side = make_side()
    side.grow(8)
    side.engine.connector.connectors["loopback"].refuse.add("close")
    side.thread.close_connector()
    assert side.thread.stop(5.0)
    assert side.thread.is_closed is False
    assert "did not close: close is refused" in caplog.text
    side.engine.connector.connectors["loopback"].refuse.clear()


def test_movements_add_up():
    from kvxfer.control.router_messages import TransferStats

    stats = TransferStats()
    for start, end, size in ((100, 160, 10), (90, 120, 5), (150, 155, 1)):
        stats = add_movement(stats, Movement(size, 2, start, end, None))
    assert stats == TransferStats(
        num_bytes=16, num_runs=6, num_tickets=3, busy_ns=95, start_ns=90, end_ns=160
    )


# --- peers of several ranks -----------------------------------------------------------------------


@pytest.fixture
def three(make_side):
    """A worker, and two that it takes for the ranks of one peer."""
    left, first, second = (make_side(name) for name in ("left", "first", "second"))
    growths = [side.grow(16) for side in (left, first, second)]
    for side, growth in zip((left, first, second), growths, strict=True):
        side.regions = RegionSet().add(growth.regions)
    ranks = [
        RankFacts(side.engine.cache.buffer.base_address, growth.descriptions[0], [])
        for side, growth in zip((first, second), growths[1:], strict=True)
    ]
    told = []
    left.thread.connect("peer", ranks, told.append, told.append)
    left.until(lambda: bool(told))
    assert told == [{"loopback"}]
    return left, first, second


def moves_to(left, *ranks):
    return [RankMove(0, rank, plan_between(left, side)) for rank, side in enumerate(ranks)]


def test_a_piece_has_arrived_when_it_is_in_all_ranks(three):
    left, first, second = three
    for view in left.engine.cache.views[0]:
        view[[1, 5, 3]] = 7.0
    moves, ended = moves_to(left, first, second), []
    left.thread.move_ranks("peer", PUSH, moves, ended.append)
    left.until(lambda: bool(ended))
    (movement,) = ended
    assert movement.error is None
    assert movement.num_bytes == sum(move.plan.total_bytes for move in moves)
    for side in (first, second):
        assert all(bool((view[[1, 5, 3]] == 7.0).all()) for view in side.engine.cache.views[0])


def test_an_error_in_one_rank_is_told_once_the_others_are_at_rest(three):
    left, first, second = three
    transport = left.engine.connector.connectors["loopback"]
    transport.moving.clear()
    moves, ended = moves_to(left, first, second), []
    moves[1] = RankMove(0, 7, moves[1].plan)
    left.thread.move_ranks("peer", PUSH, moves, ended.append)
    left.until(lambda: transport.num_submitted == 2)
    time.sleep(0.02)
    left.until(lambda: True)
    assert ended == [], "the first rank's blocks are being written"
    transport.moving.set()
    left.until(lambda: bool(ended))
    assert "peer#7" in ended[0].error


def test_every_rank_of_a_lost_peer_is_forgotten(three):
    left, first, second = three
    left.thread.disconnect("peer", lambda error: None)
    ended = []
    for move in moves_to(left, first, second):
        left.thread.move_ranks("peer", PUSH, [move], ended.append)
    left.until(lambda: len(ended) == 2)
    assert all(movement.error for movement in ended)


# --- a peer that revoked regions ------------------------------------------------------------------


def renewed(left, right, regions=None):
    """Ask `left` to learn `right` afresh; the list gets True, or the error's text."""
    told = right.regions.regions if regions is None else regions
    found, described = [], right.engine.connector.describe(told)
    left.thread.renew(
        "right",
        [RankFacts(right.engine.cache.buffer.base_address, described, [])],
        lambda _: found.append(True),
        lambda error: found.append(str(error)),
    )
    return found


def test_a_peer_is_learnt_afresh_with_just_what_it_still_has(pair):
    left, right = pair
    assert len(right.regions.regions) > 0
    found = renewed(left, right, [])
    left.until(lambda: bool(found))
    assert found == [True]
    moved = []
    left.thread.move("right", PUSH, plan_between(left, right), moved.append)
    left.until(lambda: bool(moved))
    assert "lie in no registered region" in moved[0].error


def test_transfers_with_the_peer_end_first_and_new_ones_wait(pair):
    left, right = pair
    left.engine.connector.connectors["loopback"].moving.clear()
    before, after = [], []
    left.thread.move("right", PUSH, plan_between(left, right), before.append)
    left.until(lambda: left.engine.connector.connectors["loopback"].num_submitted == 1)
    found = renewed(left, right)
    left.thread.move("right", PUSH, plan_between(left, right), after.append)
    time.sleep(0.05)
    left.until(lambda: True)
    assert (before, found, after) == ([], [], [])
    assert left.engine.connector.connectors["loopback"].num_submitted == 1
    left.engine.connector.connectors["loopback"].moving.set()
    left.until(lambda: bool(after))
    assert found == [True]
    assert [movement.error for movement in (*before, *after)] == [None, None]


def test_what_waits_for_a_peer_that_is_lost_ends_in_an_error(pair):
    left, right = pair
    left.engine.connector.connectors["loopback"].moving.clear()
    before, after = [], []
    left.thread.move("right", PUSH, plan_between(left, right), before.append)
    left.until(lambda: left.engine.connector.connectors["loopback"].num_submitted == 1)
    found = renewed(left, right)
    left.thread.move("right", PUSH, plan_between(left, right), after.append)
    left.thread.disconnect("right", lambda error: None)
    left.until(lambda: bool(found and after))
    assert "was disconnected" in found[0]
    assert "was disconnected" in after[0].error
    left.engine.connector.connectors["loopback"].moving.set()
    left.until(lambda: bool(before))
    assert "was disconnected" in before[0].error


def test_a_renewal_that_fails_is_told(pair):
    left, right = pair
    left.engine.connector.connectors["loopback"].refuse.add("connect")
    found = renewed(left, right)
    left.until(lambda: bool(found))
    assert found == ["connect is refused"]


def test_regions_are_released_only_after_they_were_deregistered(pair):
    _, right = pair
    seen, done = [], []
    right.thread.release(
        right.regions.regions,
        lambda: seen.append(right.registered()),
        done.append,
        lambda error: done.append(str(error)),
    )
    right.until(lambda: bool(done))
    assert (seen, done) == ([set()], [None])
    growth = right.grow(16)
    assert set(growth.regions) == right.registered() == right.committed(), "and told again"
