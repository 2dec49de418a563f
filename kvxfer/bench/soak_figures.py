"""What a soak came to, as figures."""

from __future__ import annotations

from typing import Protocol

from kvxfer.bench.report import Figure
from kvxfer.bench.soak_cluster import Held

GROWTH = {"rss_bytes": 32 << 20, "files": 0, "sockets": 0, "threads": 0}
"""By what a process holds: how much more than at the begin it may hold later. The interpreter's
heap breathes; a leak of 1 KiB a hand-over would be three times that."""
UNITS = {"rss_bytes": "bytes", "files": "files", "sockets": "sockets", "threads": "threads"}


class Found(Protocol):
    """Of `soak.Soak`, what figures are made of."""

    wrong: int
    failed: list[str]
    done: int
    shrinks: int
    sleeps: int
    held: list[Held]
    problems: list[str]
    growths: dict[str, int]
    took_s: float


def figures_of(name: str, wanted: int, found: Found) -> list[Figure]:
    """`name` begins each metric; `wanted` hand-overs were to be done."""

    def none(metric: str, value: float, unit: str) -> Figure:
        return Figure(f"{name}: {metric}", value, unit, 0.0, "lower", 1, 0.0)

    def told(metric: str, value: float, unit: str, bar: float | None = None) -> Figure:
        return Figure(f"{name}: {metric}", value, unit, bar, "higher", 1, 0.0)

    return [
        told("hand-overs", found.done, "requests", wanted),
        told("hand-overs a second", found.done / found.took_s, "/s"),
        told("shrinks that gave memory back", found.shrinks, "", 1),
        *(told(f"growths of {worker}", number, "", 1) for worker, number in found.growths.items()),
        told("sleeps of both workers", found.sleeps, "", 1),
        none("wrong answers", found.wrong, "requests"),
        none("failed requests", len(found.failed), "requests"),
        none("blocks or regions that do not add up", len(found.problems), ""),
        *_growth(name, found),
    ]


def _growth(name: str, found: Found) -> list[Figure]:
    """By process and by what it holds: at the begin, in the middle and at the end of the part that
    is looked at, and how much came to it in all."""
    begin, middle, end = found.held[0], found.held[len(found.held) // 2], found.held[-1]
    figures = []
    for process, first in begin.by_process.items():
        for what, value in first.items():
            moments = {"begin": value, "middle": middle.by_process[process][what]}
            moments["end"] = end.by_process[process][what]
            metric, unit, more = f"{name}: {process}, {what}", UNITS[what], GROWTH[what]
            figures += [
                Figure(f"{metric}, {moment}", held, unit, None, "lower", 1, 0.0)
                for moment, held in moments.items()
            ]
            grown = moments["end"] - value
            figures.append(Figure(f"{metric}, grown", grown, unit, more, "lower", 1, 0.0))
    return figures
