"""How many tokens a second a model computes, while it computes."""

from __future__ import annotations

import time
from collections.abc import Callable

WEIGHT = 0.125
"""Of the newest measurement in the mean."""


class Pace:
    """One step at a time. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = 0.0
        self._mean_s = 0.0
        """For each token."""

    def begin(self) -> None:
        self._began_s = self._clock()

    def end(self, num_tokens: int) -> None:
        """The step that began last computed so many."""
        each_s = (self._clock() - self._began_s) / max(1, num_tokens)
        self._mean_s += WEIGHT * (each_s - self._mean_s) if self._mean_s else each_s

    @property
    def tokens_per_s(self) -> float:
        """0 before anything was measured."""
        return 1 / self._mean_s if self._mean_s > 0 else 0.0
