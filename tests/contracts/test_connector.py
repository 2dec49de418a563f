"""What every connector does, by one body: two agents of this process, each with a window.

Over 300 lines, since the contract is one and its fixture serves every case.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from kvxfer.errors import ConnectorError
from kvxfer.memory.host import HostDriver
from kvxfer.memory.virtual_buffer import VirtualBuffer
from kvxfer.transfer.connector import (
    Connector,
    Direction,
    MemoryWindow,
    TicketResult,
    find_connector,
)
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region

KIB = 1024
MIB = 1024 * KIB
WINDOW_BYTES = 2 * MIB
FIRST = Region(256 * KIB, 512 * KIB)
SECOND = Region(FIRST.end, 512 * KIB)
LATER = Region(SECOND.end + 64 * KIB, 256 * KIB)
SPARE = Region(LATER.end, 64 * KIB)
WIDE = Region(MIB, 32 * MIB)
MANY_RUNS = {"mooncake": 2_000}
"""Where 10,000 take too long: a run costs its engine 80 µs, and its queue holds 1,024."""
DEADLINE_S = 20.0
TRANSPORTS = ("loopback", "nixl", "peer", "staged", "mooncake", "offload")
_names = count()


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """Agents end when they are collected: here, and not under a later test that counts files."""
    yield
    gc.collect()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test over every transport, and in every direction it has where the test asks."""
    if "direction" in metafunc.fixturenames:
        ways = [(name, way) for name in TRANSPORTS for way in ways_of(name)]
        metafunc.parametrize(("transport", "direction"), ways)
    elif "transport" in metafunc.fixturenames:
        metafunc.parametrize("transport", TRANSPORTS)


def ways_of(transport: str) -> list[Direction]:
    return [way for way in Direction if way in find_connector(transport).directions]


@pytest.fixture
def way(transport: str) -> Direction:
    """Some direction that the transport has."""
    return ways_of(transport)[0]


@dataclass
class Side:
    """A connector, its window's bytes, and what they were before anything moved."""

    connector: Connector
    name: str
    bytes: np.ndarray = field(repr=False)
    before: np.ndarray = field(repr=False)

    @property
    def base(self) -> int:
        return int(self.bytes.ctypes.data)

    def meet(self, other: Side, regions: Sequence[Region]) -> None:
        told, invitation = other.connector.describe(regions), other.connector.invite()
        self.connector.connect(other.name, other.base, told, invitation)

    def changed(self) -> int:
        return int(np.count_nonzero(self.bytes != self.before))


MakeSide = Callable[..., Side]


def committed(size_bytes: int, chunks: Sequence[Region]) -> VirtualBuffer:
    """All of it, and `chunks` one chunk each."""
    buffer = VirtualBuffer(HostDriver(), size_bytes)
    end = 0
    for chunk in sorted(chunks):
        if end < chunk.offset:
            buffer.commit([(end, chunk.offset - end)])
        buffer.commit([(chunk.offset, chunk.size)])
        end = chunk.end
    buffer.commit([(end, size_bytes - end)])
    return buffer


@pytest.fixture
def make_side(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeSide]:
    if reason := find_connector(transport).why_missing():
        pytest.skip(f"{transport}: {reason}")
    (tmp_path / "peers").mkdir(0o700)
    monkeypatch.setenv("KVXFER_PEER_DIR", str(tmp_path / "peers"))
    made: list[tuple[Connector, VirtualBuffer]] = []

    def make(
        name: str, regions: Sequence[Region] = (FIRST, SECOND), size_bytes: int = WINDOW_BYTES
    ) -> Side:
        more = (LATER, SPARE) if size_bytes == WINDOW_BYTES else ()
        buffer = committed(size_bytes, (*{*regions, *more},))
        raw = (ctypes.c_uint8 * size_bytes).from_address(buffer.base_address)
        memory = np.ctypeslib.as_array(raw)
        memory[:] = np.random.default_rng(len(made)).integers(0, 256, size_bytes, dtype=np.uint8)
        window = MemoryWindow(buffer.base_address, size_bytes, "cpu", buffer)
        connector = find_connector(transport)(f"{name}-agent-{next(_names)}", window)
        made.append((connector, buffer))
        connector.register(list(regions))
        return Side(connector, name, memory, memory.copy())

    yield make
    for connector, _ in made:
        connector.close()
    for _, buffer in made:
        buffer.close()


@pytest.fixture
def pair(make_side: MakeSide) -> tuple[Side, Side]:
    """Two sides that know each other's first two regions."""
    left, right = make_side("left"), make_side("right")
    left.meet(right, [FIRST, SECOND])
    right.meet(left, [FIRST, SECOND])
    return left, right


def plan_of(*runs: tuple[int, int, int]) -> TransferPlan:
    """Runs are (source offset, destination offset, size)."""
    columns = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    return TransferPlan.of_runs(*(column.copy() for column in columns))


def reaching(way: Direction, *runs: tuple[int, int, int]) -> TransferPlan:
    """Runs are (our offset, the peer's offset, size)."""
    push = way is Direction.PUSH
    return plan_of(*((a, b, size) if push else (b, a, size) for a, b, size in runs))


def ends(way: Direction, mover: Side, other: Side) -> tuple[Side, Side]:
    """Source and destination."""
    return (mover, other) if way is Direction.PUSH else (other, mover)


THEIRS = {Direction.PUSH: "destination", Direction.PULL: "source"}
OURS = {Direction.PUSH: "source", Direction.PULL: "destination"}


def finish(ticket: int, mover: Side, *others: Side) -> TicketResult:
    """Poll all sides until `mover`'s ticket ends, once and alone."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for other in others:
            other.connector.poll()
        ended = mover.connector.poll()
        if ended:
            assert [result.ticket for result in ended] == [ticket]
            return ended[0]
        time.sleep(0.0002)
    raise TimeoutError(f"ticket {ticket} did not end in {DEADLINE_S} s")


def move(mover: Side, other: Side, direction: Direction, plan: TransferPlan) -> None:
    ticket = mover.connector.submit(other.name, direction, plan)
    assert finish(ticket, mover, other).error is None


def check_moved(source: Side, destination: Side, plan: TransferPlan) -> None:
    """The destination holds the plan's bytes and is untouched elsewhere, as is the source."""
    expected = destination.before.copy()
    for origin, to, size in zip(plan.src_offsets, plan.dst_offsets, plan.sizes, strict=True):
        expected[to : to + size] = source.bytes[origin : origin + size]
    np.testing.assert_array_equal(destination.bytes, expected)
    assert source.changed() == 0


SOME_RUNS = plan_of(
    (FIRST.offset, SECOND.offset + 7, 1),
    (FIRST.offset + 5, FIRST.offset, 4097),
    (FIRST.end - 3, SECOND.end - 3, 3),
    (SECOND.offset, FIRST.offset + 30_001, 300 * KIB),
)


def test_moves_exactly_the_plans_bytes(pair: tuple[Side, Side], direction: Direction) -> None:
    mover, other = pair
    move(mover, other, direction, SOME_RUNS)
    check_moved(*ends(direction, mover, other), SOME_RUNS)


def test_many_runs(make_side: MakeSide, direction: Direction, transport: str) -> None:
    num_runs = MANY_RUNS.get(transport, 10_000)
    left, right = (make_side(name, [WIDE], WIDE.end + MIB) for name in ("left", "right"))
    left.meet(right, [WIDE])
    rng = np.random.default_rng(7)
    slots = WIDE.size // (2 * KIB)
    origins, places = (rng.permutation(slots)[:num_runs] * 2 * KIB + WIDE.offset for _ in range(2))
    plan = TransferPlan.of_runs(origins, places, np.full(num_runs, 2 * KIB, dtype=np.int64))
    move(left, right, direction, plan)
    check_moved(*ends(direction, left, right), plan)


def test_several_tickets_at_once(pair: tuple[Side, Side], transport: str) -> None:
    left, right = pair
    ways = ways_of(transport)
    wanted = {
        left.connector.submit("right", way, reaching(way, run))
        for way, run in [
            (ways[0], (FIRST.offset, FIRST.offset, 400 * KIB)),
            (ways[0], (SECOND.offset, SECOND.offset, 400 * KIB)),
            (ways[-1], (SECOND.end - 8, FIRST.end - 8, 8)),
        ]
    }
    assert len(wanted) == 3
    ended: list[TicketResult] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(ended) < 3 and time.monotonic() < deadline:
        ended += left.connector.poll()
        right.connector.poll()
    assert {result.ticket for result in ended} == wanted
    assert not any(result.error for result in ended)
    assert left.connector.poll() == []


def test_an_empty_plan_completes_at_the_next_poll(pair: tuple[Side, Side]) -> None:
    left, right = pair
    ticket = left.connector.submit("right", Direction.PULL, plan_of())
    assert left.connector.poll() == [TicketResult(ticket)]
    assert left.changed() == right.changed() == 0


def test_regions_added_later(pair: tuple[Side, Side], way: Direction) -> None:
    left, right = pair
    right.connector.register([LATER])
    unannounced = reaching(way, (FIRST.offset, LATER.offset, KIB))
    with pytest.raises(ConnectorError, match=THEIRS[way]):
        left.connector.submit("right", way, unannounced)
    assert left.changed() == right.changed() == 0
    left.meet(right, [LATER])
    left.meet(right, [LATER])  # told twice is told once
    both = reaching(way, (FIRST.offset, LATER.end - KIB, KIB), (SECOND.offset, FIRST.offset, KIB))
    move(left, right, way, both)
    check_moved(*ends(way, left, right), both)


def test_a_connection_without_regions_comes_first(make_side: MakeSide) -> None:
    left, right = make_side("left"), make_side("right")
    left.meet(right, [])
    with pytest.raises(ConnectorError):
        left.connector.submit("right", Direction.PULL, SOME_RUNS)
    left.meet(right, [FIRST])
    left.meet(right, [SECOND])
    move(left, right, Direction.PULL, SOME_RUNS)
    check_moved(right, left, SOME_RUNS)


OUTSIDE = [
    ([(FIRST.offset - 1, FIRST.offset, 8)], "source"),
    ([(SECOND.end - 7, FIRST.offset, 8)], "source"),
    ([(FIRST.offset, 0, 8)], "destination"),
    ([(FIRST.offset, FIRST.offset, 8), (0, FIRST.offset, 8)], "source"),
    ([(FIRST.end - 4, FIRST.offset, 8)], "source"),
    ([(FIRST.offset, FIRST.end - 4, 8)], "destination"),
    ([(-8, FIRST.offset, 8)], "source"),
    ([(2**63 - 4, FIRST.offset, 8)], "source"),
    ([(FIRST.offset, FIRST.offset, 0)], "0 bytes"),
    ([(FIRST.offset, FIRST.offset + 64, -8)], "-8 bytes"),
]


def test_a_run_outside_one_region_is_refused(pair: tuple[Side, Side], direction: Direction) -> None:
    left, right = pair
    for runs, blamed in OUTSIDE:
        with pytest.raises(ConnectorError, match=blamed):
            left.connector.submit("right", direction, plan_of(*runs))
    assert left.connector.poll() == []
    assert left.changed() == right.changed() == 0


def test_an_unknown_peer_is_refused(pair: tuple[Side, Side], way: Direction) -> None:
    with pytest.raises(ConnectorError, match="stranger"):
        pair[0].connector.submit("stranger", way, SOME_RUNS)


def test_a_direction_that_it_has_not_is_refused(pair: tuple[Side, Side], transport: str) -> None:
    left, right = pair
    for other in set(Direction).difference(ways_of(transport)):
        with pytest.raises(ConnectorError, match=f"direction {other}"):
            left.connector.submit("right", other, SOME_RUNS)
    assert left.changed() == right.changed() == 0


def test_registration_is_all_or_nothing(pair: tuple[Side, Side], way: Direction) -> None:
    left, right = pair
    for bad in (Region(FIRST.end - 1, 2), FIRST, Region(WINDOW_BYTES - 1, 2)):
        with pytest.raises(ConnectorError):
            right.connector.register([SPARE, bad])
        with pytest.raises(ConnectorError, match="not registered"):
            right.connector.describe([SPARE])
    right.connector.register([SPARE])
    left.meet(right, [SPARE])
    plan = reaching(way, (FIRST.offset, SPARE.offset, SPARE.size))
    move(left, right, way, plan)
    check_moved(*ends(way, left, right), plan)


def test_deregistration_takes_a_local_range_back(pair: tuple[Side, Side], way: Direction) -> None:
    left, right = pair
    with pytest.raises(ConnectorError, match="not registered"):
        left.connector.deregister([FIRST, LATER])
    left.connector.deregister([FIRST])
    with pytest.raises(ConnectorError, match="not registered"):
        left.connector.describe([FIRST, SECOND])
    with pytest.raises(ConnectorError, match=OURS[way]):
        left.connector.submit("right", way, SOME_RUNS)
    left.connector.register([FIRST])
    move(left, right, way, SOME_RUNS)
    check_moved(*ends(way, left, right), SOME_RUNS)


def test_a_damaged_description_is_refused_and_the_good_one_still_works(
    make_side: MakeSide,
) -> None:
    left, right = make_side("left"), make_side("right")
    good = right.connector.describe([FIRST, SECOND])
    flipped = [bytearray(good) for _ in range(0, len(good), 7)]
    for position, copy in zip(range(0, len(good), 7), flipped, strict=True):
        copy[position] ^= 0x41
    for bad in (b"", good[:-1], good[: len(good) // 2], good + b"\0", *map(bytes, flipped)):
        with pytest.raises(ConnectorError):
            left.connector.connect("right", right.base, bad)
    with pytest.raises(ConnectorError, match="not connected"):
        left.connector.submit("right", Direction.PULL, SOME_RUNS)
    left.connector.connect("right", right.base, good, right.connector.invite())
    with pytest.raises(ConnectorError):
        left.connector.connect("right", right.base, good[:-1])
    move(left, right, Direction.PULL, SOME_RUNS)
    check_moved(right, left, SOME_RUNS)


def test_a_description_that_contradicts_is_refused(pair: tuple[Side, Side], way: Direction) -> None:
    left, right = pair
    told = right.connector.describe([FIRST])
    with pytest.raises(ConnectorError, match="already peer right"):
        left.connector.connect("other", right.base, told)
    with pytest.raises(ConnectorError, match="moved"):
        left.connector.connect("right", right.base + 4096, told)
    with pytest.raises(ConnectorError, match="our own"):
        left.connector.connect("me", left.base, left.connector.describe([FIRST]))
    move(left, right, way, SOME_RUNS)
    check_moved(*ends(way, left, right), SOME_RUNS)


def test_disconnect_ends_tickets_and_reconnect_works(pair: tuple[Side, Side]) -> None:
    left, right = pair
    ticket = left.connector.submit("right", Direction.PULL, SOME_RUNS)
    left.connector.disconnect("right")
    left.connector.disconnect("stranger")
    result = finish(ticket, left, right)
    assert result.error is not None and "disconnected" in result.error
    with pytest.raises(ConnectorError, match="not connected"):
        left.connector.submit("right", Direction.PULL, SOME_RUNS)
    left.meet(right, [FIRST])
    with pytest.raises(ConnectorError, match="source"):
        left.connector.submit("right", Direction.PULL, SOME_RUNS)
    left.meet(right, [SECOND])
    move(left, right, Direction.PULL, SOME_RUNS)
    check_moved(right, left, SOME_RUNS)


def test_revoked_regions_are_out_of_reach_until_announced_again(
    pair: tuple[Side, Side], direction: Direction
) -> None:
    """A cache that goes to sleep and wakes: disconnect, connect without regions, then with."""
    left, right = pair
    source, target = ends(direction, left, right)
    move(left, right, direction, SOME_RUNS)
    right.connector.deregister([FIRST, SECOND])
    left.connector.disconnect("right")
    left.meet(right, [])
    with pytest.raises(ConnectorError, match="lie in no registered region"):
        left.connector.submit("right", direction, SOME_RUNS)
    with pytest.raises(ConnectorError, match="lie in no registered region"):
        right.connector.submit("left", direction, SOME_RUNS)
    right.connector.register([FIRST, SECOND])
    left.meet(right, [FIRST, SECOND])
    source.bytes[FIRST.offset : SECOND.end] ^= 0xFF
    source.before[:], target.before[:] = source.bytes, target.bytes
    move(left, right, direction, SOME_RUNS)
    check_moved(source, target, SOME_RUNS)


def test_renewal_keeps_what_is_named_and_forgets_the_rest(
    pair: tuple[Side, Side], way: Direction
) -> None:
    left, right = pair
    both = reaching(way, (FIRST.offset, FIRST.offset, KIB), (SECOND.offset, SECOND.offset, KIB))
    move(left, right, way, both)
    right.connector.deregister([SECOND])
    told, invitation = right.connector.describe([FIRST]), right.connector.invite()
    left.connector.renew("right", right.base, told, invitation)
    with pytest.raises(ConnectorError, match=THEIRS[way]):
        left.connector.submit("right", way, both)
    right.connector.register([SECOND])
    left.meet(right, [SECOND])
    source, destination = ends(way, left, right)
    source.bytes[FIRST.offset : SECOND.end] ^= 0xFF
    source.before[:] = source.bytes
    move(left, right, way, both)
    check_moved(source, destination, both)


def test_what_was_described_serves_who_has_not_renewed_until_it_is_retired(
    pair: tuple[Side, Side], direction: Direction
) -> None:
    left, right = pair
    source, destination = ends(direction, left, right)
    first, both = (
        reaching(direction, *((region.offset, region.offset, KIB) for region in regions))
        for regions in ([FIRST], [FIRST, SECOND])
    )

    def moves(plan: TransferPlan) -> None:
        source.bytes[FIRST.offset : SECOND.end] ^= 0xFF
        source.before[:] = source.bytes
        move(left, right, direction, plan)
        check_moved(source, destination, plan)
        destination.before[:] = destination.bytes

    told = right.connector.revoke([FIRST], 1)
    moves(both)
    move(right, left, direction, first)  # who revokes knows its peers as before
    source.before[:], destination.before[:] = source.bytes, destination.bytes
    left.connector.renew("right", right.base, told, right.connector.invite())
    with pytest.raises(ConnectorError, match=THEIRS[direction]):
        left.connector.submit("right", direction, both)
    right.connector.deregister([SECOND])
    right.connector.retire(())
    moves(first)
    right.connector.register([SECOND])
    left.meet(right, [SECOND])
    moves(both)


def test_a_restarted_peer_takes_its_name_over(
    pair: tuple[Side, Side], make_side: MakeSide, way: Direction
) -> None:
    left, right = pair
    move(left, right, way, SOME_RUNS)
    left.before[:] = left.bytes
    right.connector.close()
    reborn = make_side("right")
    left.meet(reborn, [FIRST])
    with pytest.raises(ConnectorError, match=THEIRS[way]):
        left.connector.submit("right", way, SOME_RUNS)
    left.meet(reborn, [SECOND])
    move(left, reborn, way, SOME_RUNS)
    check_moved(*ends(way, left, reborn), SOME_RUNS)


def test_close_is_idempotent_and_final(pair: tuple[Side, Side], way: Direction) -> None:
    left, right = pair
    told = right.connector.describe([FIRST])
    left.connector.close()
    left.connector.close()
    uses: list[Callable[[], object]] = [
        lambda: left.connector.register([LATER]),
        lambda: left.connector.deregister([FIRST]),
        lambda: left.connector.describe([FIRST]),
        lambda: left.connector.connect("right", right.base, told),
        lambda: left.connector.submit("right", way, SOME_RUNS),
        lambda: left.connector.disconnect("right"),
        lambda: left.connector.poll(),
    ]
    for use in uses:
        with pytest.raises(ConnectorError, match="closed"):
            use()
    assert right.connector.poll() == []
