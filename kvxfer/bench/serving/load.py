"""When requests are sent. Pure, but for the chance that is passed in."""

from __future__ import annotations

import math

import numpy as np


def arrivals(
    count: int, request_rate: float, burstiness: float, chance: np.random.Generator
) -> list[float]:
    """Seconds from a round's start, ascending, the first at 0.

    Pauses are gamma distributed with the shape `burstiness` and the mean 1 / `request_rate`: of
    shape 1 that is a Poisson process, and the coefficient of variation is 1 / sqrt(burstiness).
    An infinite rate has no pauses.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    scale = 1.0 / (request_rate * burstiness)
    pauses = chance.gamma(burstiness, scale, count - 1)
    return [0.0, *np.cumsum(pauses).tolist()]
