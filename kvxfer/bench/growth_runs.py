"""The rounds of one case of `kvxfer bench growth`: what is done, in which order, and found."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from kvxfer.bench.growth_figures import Found, InFlight
from kvxfer.bench.growth_flow import Moved
from kvxfer.bench.growth_pair import GrowthPair
from kvxfer.bench.growth_steps import Grown, Shrunk, grow_steps, shrink_steps
from kvxfer.errors import TransferError

if TYPE_CHECKING:
    from kvxfer.bench.growth import GrowthOptions
    from kvxfer.bench.growth_cases import Case

FIRST_SEED = 1000


def measure(pair: GrowthPair, case: Case, options: GrowthOptions, found: Found) -> Iterator[None]:
    """Into `found`, round by round: first those of growing and shrinking, then those of sleep,
    after which the cache has its memory in other chunks. Yields after each. Raises KvxferError."""
    rounds = Rounds(pair, case, options, found)
    for step in (rounds.grow_and_shrink, rounds.sleep_and_wake):
        for index in range(-options.warm_up, options.runs):
            step(index >= 0)
            yield
        if step == rounds.grow_and_shrink:
            rounds.grow(None)
    found.is_complete = True


class Rounds:
    def __init__(self, pair: GrowthPair, case: Case, options: GrowthOptions, found: Found) -> None:
        self._pair = pair
        self._case = case
        self._options = options
        self._found = found
        self._seeds = count(FIRST_SEED)

    def grow_and_shrink(self, is_counted: bool) -> None:
        """A growth by itself, and one that transfers are in flight beside; a shrink after each."""
        found, options = self._found, self._options
        self.grow(found.grows if is_counted else None)
        self._shrink(is_counted)
        self._pair.ask(self._case.mover, "begin_flow", options.transfers)
        grown = self.grow(found.grows_beside if is_counted else None)
        moved = self._end_flow(options.transfers)
        if is_counted:
            found.in_flight.append(InFlight.of(moved, grown))
        self._shrink(is_counted)
        self._check_transfer()
        found.num_rounds += is_counted

    def sleep_and_wake(self, is_counted: bool) -> None:
        pair, case, found = self._pair, self._case, self._found
        self._drop("sleep", (), found.sleeps if is_counted else None)
        self._raise("wake", (), found.wakes if is_counted else None)
        found.num_outlived += pair.ask(case.owner, "outlived") if is_counted else 0
        pair.ask(case.owner, "prepare")
        self._check_transfer()
        found.num_wakes += is_counted

    def grow(self, into: list[dict[str, float]] | None) -> Grown:
        case = self._case
        grown = self._raise("grow", (case.capacity_blocks(case.owner),), into)
        self._found.added_bytes = grown.added_bytes
        return grown

    def _raise(
        self, verb: str, arguments: tuple[int, ...], into: list[dict[str, float]] | None
    ) -> Grown:
        case, pair, seed = self._case, self._pair, next(self._seeds)
        pair.ask(case.mover, "arm", seed)
        grown: Grown = pair.ask(case.owner, verb, *arguments, seed)
        laps, moments = pair.ask(case.mover, "report")
        steps = grow_steps(grown, laps, moments)
        self._found.num_verified += 1
        if into is not None:
            into.append(steps)
        return grown

    def _shrink(self, is_counted: bool) -> None:
        into = self._found.shrinks if is_counted else None
        shrunk = self._drop("shrink", (self._pair.base_blocks,), into)
        self._found.num_lost += shrunk.lost
        if shrunk.lost:
            raise TransferError("shrink: a block below the bound does not hold what it held")

    def _drop(
        self, verb: str, arguments: tuple[int, ...], into: list[dict[str, float]] | None
    ) -> Shrunk:
        case, pair = self._case, self._pair
        pair.ask(case.mover, "report")
        shrunk: Shrunk = pair.ask(case.owner, verb, *arguments)
        laps, _ = pair.ask(case.mover, "report")
        steps = shrink_steps(shrunk, laps)
        if into is not None:
            into.append(steps)
        return shrunk

    def _check_transfer(self) -> None:
        """The lane works after what was taken and given."""
        self._pair.ask(self._case.mover, "begin_flow", 1)
        self._end_flow(0)

    def _end_flow(self, num_after: int) -> Moved:
        moved: Moved = self._pair.ask(self._case.mover, "end_flow", num_after)
        self._found.num_verified += moved.num_verified
        self._found.num_wrong += moved.num_wrong
        if moved.num_wrong:
            total = moved.num_verified + moved.num_wrong
            raise TransferError(f"{moved.num_wrong} of {total} transfers arrived with wrong bytes")
        return moved
