"""Which pair a request gets in the model: as `kvxfer.serve.pairing` has it, for many workers.

That looks at each pair that is as good as the best, one by one. Here every lane is as quick as the
others, so what a pair costs is what its two sides cost, and those pairs can be counted instead: the
same pairs, with the same chance for each. What the real way costs the router is in the `Costs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvxfer.serve.pairing import MOST_OF_A_SIDE, nearly

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Choice:
    """A pair, by place, and how many the router looks at to choose it, at the most."""

    prefill: int
    decode: int
    num_seen: int


def choose(
    prefill_s: Floats, decode_s: Floats, moves_s: float, chance: np.random.Generator
) -> Choice:
    """One of the pairs of which both sides and the hand-over together cost about as little as of
    the best; neither side is empty."""
    bound = nearly(float(prefill_s.min() + decode_s.min() + moves_s)) - moves_s
    order = np.argsort(decode_s, kind="stable")
    fits = np.searchsorted(decode_s[order], bound - prefill_s, side="right")
    ends = np.cumsum(fits)
    total = int(ends[-1])
    if not total:  # the bound, less one side, is rounded below the other
        return Choice(int(prefill_s.argmin()), int(decode_s.argmin()), 1)
    drawn = int(chance.integers(total))
    prefill = int(np.searchsorted(ends, drawn, side="right"))
    rank = drawn - int(ends[prefill] - fits[prefill])
    return Choice(prefill, int(order[rank]), min(total, MOST_OF_A_SIDE**2))
