"""The rounds of one case of `kvxfer bench growth`: what is done, in which order, and found."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from kvxfer.bench.growth_figures import WHO, Found, InFlight, Steps
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
    """What is asked of the two workers. Each ends with the caches as it found them, but for the
    chunks that a wake-up makes."""

    def __init__(self, pair: GrowthPair, case: Case, options: GrowthOptions, found: Found) -> None:
        self._pair = pair
        self._case = case
        self._options = options
        self._found = found
        self._seeds = count(FIRST_SEED)

    def grow_and_shrink(self, is_counted: bool) -> None:
        """A growth by itself, and one of either end that transfers are in flight beside; a shrink
        after each."""
        found, case = self._found, self._case
        self.grow(found.grows if is_counted else None)
        self._shrink(case.owner, found.shrinks if is_counted else None)
        for who, role in zip(WHO, (case.owner, case.mover), strict=True):
            moved, grown = self._grow_beside(role, is_counted)
            if is_counted:
                found.beside[who].append(InFlight.of(moved, grown))
        self._check_transfer()
        found.num_rounds += is_counted

    def _grow_beside(self, role: str, is_counted: bool) -> tuple[Moved, Grown]:
        case, found = self._case, self._found
        self._pair.ask(case.mover, "begin_flow", self._options.transfers)
        if role == case.owner:
            grown = self.grow(found.grows_beside if is_counted else None)
        else:
            grown = self._pair.ask(role, "grow", case.capacity_blocks(role), 0)
        moved = self._end_flow(self._options.transfers)
        self._shrink(role, found.shrinks if is_counted and role == case.owner else None)
        return moved, grown

    def sleep_and_wake(self, is_counted: bool) -> None:
        pair, case, found = self._pair, self._case, self._found
        self._drop(case.owner, "sleep", (), found.sleeps if is_counted else None)
        woken = self._raise("wake", (), found.wakes if is_counted else None)
        found.woken_bytes = woken.added_bytes
        found.num_outlived += pair.ask(case.owner, "outlived") if is_counted else 0
        pair.ask(case.owner, "prepare")
        self._check_transfer()
        found.num_wakes += is_counted

    def grow(self, into: list[Steps] | None) -> Grown:
        case = self._case
        grown = self._raise("grow", (case.capacity_blocks(case.owner),), into)
        self._found.grown_bytes = grown.added_bytes
        return grown

    def _raise(self, verb: str, arguments: tuple[int, ...], into: list[Steps] | None) -> Grown:
        case, pair, seed = self._case, self._pair, next(self._seeds)
        pair.ask(case.mover, "arm", seed)
        grown: Grown = pair.ask(case.owner, verb, *arguments, seed)
        laps, moments = pair.ask(case.mover, "report")
        steps = grow_steps(grown, laps, moments)
        self._found.num_verified += 1
        if into is not None:
            into.append(steps)
        return grown

    def _shrink(self, role: str, into: list[Steps] | None) -> None:
        shrunk = self._drop(role, "shrink", (self._pair.base_blocks[role],), into)
        self._found.num_lost += shrunk.lost
        if shrunk.lost:
            raise TransferError("shrink: a block below the bound does not hold what it held")

    def _drop(
        self, role: str, verb: str, arguments: tuple[int, ...], into: list[Steps] | None
    ) -> Shrunk:
        other = self._case.mover if role == self._case.owner else self._case.owner
        self._pair.ask(other, "report")
        shrunk: Shrunk = self._pair.ask(role, verb, *arguments)
        laps, _ = self._pair.ask(other, "report")
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
