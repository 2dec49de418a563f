"""Whether two measurements of one thing differ by more than they scatter."""

from __future__ import annotations

from typing import Literal

from kvxfer.bench.connectors.report import Spread

LEAST = 0.05
"""Differences below this share of the larger median are never told."""

Verdict = Literal["regression", "gain", "same"]


def judge(a: Spread, b: Spread, better: Literal["higher", "lower"]) -> Verdict:
    """What became of `a`, measured first, in `b`.

    A difference is told when the medians lie further apart than both interquartile ranges together,
    *and* than 5 % of the larger.

    Why the ranges: samples of a normal law with the interquartile range I have a median whose
    standard error is 0.93 I / √n. With two runs of n = 5 samples the sum of the ranges is 3.4
    standard errors of the difference (2.6 with 3 samples, 5.9 with 15), so a machine that did not
    change is seldom accused, and it stays so where the law has long tails, as times do: quartiles
    do not follow a few outliers.

    Why 5 % too: of few samples the quartiles are known badly and may fall together by chance, and
    what lasts longer than a run (placement of memory, clocks, neighbours) shows in no run's
    quartiles. A single sample has no range at all. Nobody chooses a connector for less.

    Swapped arguments give the opposite verdict.
    """
    difference = b.median - a.median
    least = LEAST * max(abs(a.median), abs(b.median))
    if abs(difference) <= max(a.iqr + b.iqr, least):
        return "same"
    return "gain" if (difference > 0) == (better == "higher") else "regression"
