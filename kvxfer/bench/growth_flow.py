"""Transfers in flight while a cache grows: one after another, each compared before its place is
written again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.worker.transfer_thread import Movement

Ended = Callable[[Movement], None]


@dataclass(frozen=True, slots=True)
class Moved:
    """Of one flow: spans in seconds of CLOCK_MONOTONIC, from the moment that the control thread
    wants a transfer, which the transfer thread may have no time for yet, until it is complete."""

    spans: tuple[tuple[float, float], ...]
    num_bytes: int
    """Of each."""
    num_verified: int
    num_wrong: int


class Flow:
    """Control thread only. `move` starts the transfer into a set of target blocks; `check` has it
    compared and erased, and leads to `checked`; `failed` is told why a transfer did not end well,
    after which none is begun."""

    def __init__(
        self,
        num_sets: int,
        move: Callable[[int, Ended], None],
        check: Callable[[int], None],
        failed: Callable[[str], None],
    ) -> None:
        self._num_sets = num_sets
        self._move = move
        self._check = check
        self._failed = failed
        self._free = deque(range(num_sets))
        self._is_on = self._is_flying = False
        self._num_bytes = 0
        self._spans: list[tuple[float, float]] = []
        self._num_verified = self._num_wrong = 0

    @property
    def num_landed(self) -> int:
        return len(self._spans)

    @property
    def is_over(self) -> bool:
        """Whether it was stopped, and all that arrived was compared."""
        return not (self._is_on or self._is_flying) and len(self._free) == self._num_sets

    def start(self) -> None:
        self._spans, self._num_verified, self._num_wrong = [], 0, 0
        self._is_on = True
        self._pump()

    def stop(self) -> None:
        self._is_on = False

    def result(self) -> Moved:
        counts = self._num_verified, self._num_wrong
        return Moved(tuple(self._spans), self._num_bytes, *counts)

    def checked(self, index: int, is_right: bool) -> None:
        self._num_verified += is_right
        self._num_wrong += not is_right
        self._free.append(index)
        self._pump()

    def _pump(self) -> None:
        if self._is_on and not self._is_flying and self._free:
            self._is_flying = True
            index, begin_s = self._free.popleft(), time.monotonic()
            self._move(index, lambda movement: self._ended(index, begin_s, movement))

    def _ended(self, index: int, begin_s: float, movement: Movement) -> None:
        self._is_flying = False
        if movement.error is not None:
            self._is_on = False
            self._free.append(index)
            self._failed(movement.error)
            return
        self._spans.append((begin_s, movement.end_ns / 1e9))
        self._num_bytes = movement.num_bytes
        self._check(index)
        self._pump()
