"""Which ratio of prefill to decode serves a load: the same workers, divided in several ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.bench.simulate.report import Outcome


@dataclass(frozen=True, slots=True)
class Split:
    """One way to divide them, and what came of it."""

    prefill: int
    decode: int
    outcome: Outcome


def splits_of(workers: int, steps: int) -> list[int]:
    """Numbers of prefill workers to try: evenly between 1 and all but 1, ends among them."""
    most = workers - 1
    if steps == 1:
        return [max(1, workers // 2)]
    found = [round(1 + (most - 1) * at / (steps - 1)) for at in range(steps)]
    return sorted(set(found))


def best_of(splits: Sequence[Split]) -> Split:
    """Most requests within the limits; where there are none, or several do as well, the quickest
    first token at the 99th percentile, and then the quickest answer."""

    def rank(one: Split) -> tuple[float, float, float]:
        summary = one.outcome.summary
        good = summary.get(("goodput", "requests"), 0.0)
        late = summary.get(("ttft", "p99"), float("inf"))
        return (-round(good, 6), late, summary.get(("e2el", "p99"), float("inf")))

    return min(splits, key=rank)
