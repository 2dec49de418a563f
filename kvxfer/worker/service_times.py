"""How long those who wait in a queue will wait, from how quickly it moved of late."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_GUESS_S = 0.1
"""For each of those in front, before anything was measured."""
WEIGHT = 0.125
"""Of the newest measurement in the mean."""


class ServiceTimes:
    """The mean time between two that left the queue one after the other while it was not empty.
    `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mean_s = 0.0
        self._last_s: float | None = None
        """When one left that others were waiting behind."""

    def left(self, num_waiting: int) -> None:
        """One left the queue, in which so many wait now."""
        now = self._clock()
        if self._last_s is not None:
            took_s = now - self._last_s
            self._mean_s += WEIGHT * (took_s - self._mean_s) if self._mean_s else took_s
        self._last_s = now if num_waiting else None

    def wait_s(self, num_waiting: int) -> float:
        """Until so many will have left: a queue that stands still counts as that slow."""
        standing_s = self._clock() - self._last_s if self._last_s is not None else 0.0
        return num_waiting * max(self._mean_s or FIRST_GUESS_S, standing_s)
