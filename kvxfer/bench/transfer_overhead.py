"""NIXL through our connector against bare NIXL, over the same caches with the same descriptors.

Bare NIXL runs with its progress thread and without, and the better of them counts; ours decides by
its own rule. A progress thread spins, and would disturb who is measured beside it, so only one
agent lives at a time in each process: all take turns, with a new life each.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from kvxfer.bench.report import Figure
from kvxfer.bench.transfer_pair import Pair
from kvxfer.bench.transfer_rounds import Work, run_verified, setup_of, work_of, write_sources
from kvxfer.bench.transfer_shapes import shape_of, size_name
from kvxfer.transfer.connector import Direction

_PROGRESS_THREAD = "KVXFER_NIXL_PROGRESS_THREAD"
"""As connectors/nixl_environment.py reads it."""
_OURS = "our connector"
_KINDS = {
    _OURS: ("nixl", {}),
    "bare, no progress thread": ("nixl_reference", {_PROGRESS_THREAD: "0"}),
    "bare, progress thread": ("nixl_reference", {_PROGRESS_THREAD: "1"}),
}
RUNS_A_LIFE = 5
"""The median of them counts; one more comes first and does not."""
BAR = 0.95


def nixl_overhead(
    devices: tuple[str, str], sizes: Sequence[int], size_bytes: int, rounds: int
) -> Iterator[Figure]:
    """`rounds` lives of each; the direction is that which is quick on the device."""
    is_host = devices == ("cpu", "cpu")
    direction = Direction.PUSH if is_host else Direction.PULL
    setup = setup_of([shape_of(size) for size in sizes], size_bytes)
    works = [
        work_of(size_name(size), setup, size_bytes, (group, group), direction)
        for group, size in enumerate(sizes)
    ]
    rates: dict[tuple[str, str], list[float]] = {}
    with Pair(*devices) as pair:
        pair.open("nixl", setup)
        write_sources(pair, works)
        for _ in range(rounds):
            for kind, (connector, environment) in _KINDS.items():
                pair.reconnect(connector, environment)
                for work in works:
                    rates.setdefault((kind, work.name), []).append(_rate(pair, work))
    where = "host" if is_host else "GPU"
    for work in works:
        by_kind = {kind: rates[kind, work.name] for kind in _KINDS}
        yield from _figures(f"NIXL {where} {direction} {work.name}", by_kind)


def _rate(pair: Pair, work: Work) -> float:
    """GB/s of one life. The plan is made once, descriptors and all: only moving is compared."""
    run_verified(pair, work, plan=True)
    return statistics.median(run_verified(pair, work, plan=None)[0] for _ in range(RUNS_A_LIFE))


def _figures(name: str, rates: dict[str, list[float]]) -> Iterator[Figure]:
    bare = max((kind for kind in rates if kind != _OURS), key=lambda k: statistics.median(rates[k]))
    ratios = [one / other for one, other in zip(rates[_OURS], rates[bare], strict=True)]
    yield Figure.of(f"{name}: our connector to {bare}", ratios, "×", "higher", BAR)
    for kind, samples in rates.items():
        yield Figure.of(f"{name}: {kind}", samples, "GB/s", "higher")
