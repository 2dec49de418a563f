"""Transfers measured in turn with the machine's own copies, each checked byte by byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvxfer.bench.report import Figure
from kvxfer.bench.transfer_pair import Pair
from kvxfer.bench.transfer_shapes import Shape, blocks_for, capacity_for, random_places
from kvxfer.bench.transfer_words import CacheSetup, Move
from kvxfer.errors import TransferError
from kvxfer.transfer.connector import Direction


@dataclass(frozen=True, slots=True)
class Work:
    """Something to move, over and over."""

    name: str
    move: Move
    seed: int
    """Of the pattern in the source's group."""


@dataclass(frozen=True, slots=True)
class Series:
    """What was found of one work, run by run."""

    gbps: list[float] = field(default_factory=list)
    copy_gbps: list[float] = field(default_factory=list)
    plan_ms: list[float] = field(default_factory=list)

    @property
    def shares(self) -> list[float]:
        """Of the copy made just before."""
        return [one / other for one, other in zip(self.gbps, self.copy_gbps, strict=True)]


def setup_of(shapes: Sequence[Shape], size_bytes: int, *, fixed: bool = False) -> CacheSetup:
    """A group for each of `shapes`, twice as large as what moves, all of it committed."""
    blocks = tuple(capacity_for(blocks_for(shape.spec, size_bytes)) for shape in shapes)
    return CacheSetup(tuple(shapes), blocks, blocks, fixed)


def work_of(
    name: str,
    setup: CacheSetup,
    size_bytes: int,
    groups: tuple[int, int],
    direction: Direction = Direction.PULL,
) -> Work:
    """About `size_bytes` from group to group, at random places on either side."""
    source, target = groups
    num_blocks = blocks_for(setup.shapes[source].spec, size_bytes)
    places = [
        random_places(num_blocks, range(1, setup.capacity[group]), seed=1 + 2 * group + side)
        for side, group in enumerate(groups)
    ]
    return Work(name, Move(direction, places[0], places[1], source, target), seed=1000 + source)


def write_sources(pair: Pair, works: Sequence[Work]) -> None:
    """Once for each group: nothing that moves writes to the source."""
    wanted = {work.move.src_group: work for work in works}
    for group, work in wanted.items():
        pair.ask("source", "write", group, work.move.src_blocks, work.seed)


def run_verified(pair: Pair, work: Work, *, plan: bool | None = True) -> tuple[float, float]:
    """(GB/s, ms that planning took) of one transfer of which every byte arrived.

    `plan`: make the plan, True with descriptors, False without; None: that of before is used.
    Raises TransferError if a byte is wrong.
    """
    move = work.move
    pair.ask("target", "erase", move.dst_group, move.dst_blocks)
    plan_s = 0.0 if plan is None else pair.plan(move, plan).seconds
    seconds = pair.run(move.direction)
    check_arrived(pair, work)
    return moved_bytes(pair, work) / seconds / 1e9, plan_s * 1e3


def check_arrived(pair: Pair, work: Work) -> None:
    """Raise TransferError unless the target's blocks hold what the source's do."""
    move = work.move
    if not pair.ask("target", "check", move.dst_group, move.dst_blocks, work.seed):
        raise TransferError(f"{work.name}: what arrived differs from the source's blocks")


def moved_bytes(pair: Pair, work: Work) -> int:
    spec = pair.setup.shapes[work.move.src_group].spec
    return len(work.move.src_blocks) * spec.block_bytes


def measure(
    pair: Pair,
    works: Sequence[Work],
    warm_up: int,
    runs: int,
    *,
    with_runs: bool,
    on_run: Callable[[], None] = lambda: None,
) -> dict[str, Series]:
    """By name: `runs` transfers of each, in turn, each after a copy of as many bytes. A plan is
    made for each; `with_runs`: with descriptors, before time is taken. `on_run` is called after
    each transfer."""
    write_sources(pair, works)
    found = {work.name: Series() for work in works}
    for index in range(-warm_up, runs):
        for work in works:
            size = moved_bytes(pair, work)
            copy_s = pair.gauge(work.move.direction, size)
            gbps, plan_ms = run_verified(pair, work, plan=with_runs)
            on_run()
            if index >= 0:
                series = found[work.name]
                series.gbps.append(gbps)
                series.copy_gbps.append(size / copy_s / 1e9)
                series.plan_ms.append(plan_ms)
    return found


def figures_against_copy(name: str, series: Series, bar: float | None) -> Iterator[Figure]:
    """The share of the machine's copy, with its bar, and what it is made of."""
    yield Figure.of(f"{name}: share of a contiguous copy", series.shares, "×", "higher", bar)
    yield Figure.of(f"{name}: rate", series.gbps, "GB/s", "higher")
    yield Figure.of(f"{name}: contiguous copy", series.copy_gbps, "GB/s", "higher")
    yield Figure.of(f"{name}: planning", series.plan_ms, "ms", "lower")
