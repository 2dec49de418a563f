"""`kvxfer bench compare`: two files that the same bench wrote."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from kvxfer.errors import UsageError

if TYPE_CHECKING:
    from kvxfer.bench.results import Result


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What `kvxfer bench compare` may be told, besides its two files."""

    json: bool = False
    """Print an object for machines instead of a table."""


def run_compare(a: Path, b: Path, options: CompareOptions) -> int:
    """Reports of `kvxfer bench connectors`, or lists of figures. Raises UsageError."""
    from kvxfer.bench.connectors.compare import compare_reports
    from kvxfer.bench.connectors.report import is_report

    if is_report(a) or is_report(b):
        return compare_reports(a, b, options.json)
    return compare_figures(a, b, options.json)


def compare_figures(a: Path, b: Path, as_json: bool) -> int:
    """Print what became of each metric of `a` in `b`; exit code 1 where any got worse beyond the
    noise seen (kvxfer.bench.noise). Metrics that only one has are named.

    Raises UsageError for what is no list of figures, and for runs on another machine or by another
    command.
    """
    from kvxfer.bench.comparison import Change, Comparison, show
    from kvxfer.bench.connectors.report import Spread
    from kvxfer.bench.noise import judge
    from kvxfer.bench.results import read_results

    before = {result.metric: result for result in read_results(a)}
    after = {result.metric: result for result in read_results(b)}
    if not before.keys() & after.keys():
        raise UsageError("figures", str(b), f"has no metric in common with {a}")

    def change(old: Result, new: Result) -> Change:
        for field in ("machine", "command", "unit", "better"):
            _refuse(field, old.metric, getattr(old, field), getattr(new, field))
        spreads = Spread(old.value, old.spread_iqr), Spread(new.value, new.spread_iqr)
        note = "misses its bar" if not new.ok else ""
        return Change(old.metric, old.unit, *spreads, judge(*spreads, old.better), note)

    return show(
        Comparison(
            str(a),
            str(b),
            (_commits(before.values()), _commits(after.values())),
            [change(before[name], after[name]) for name in before if name in after],
            only_a=[name for name in before if name not in after],
            only_b=[name for name in after if name not in before],
        ),
        as_json,
    )


def _refuse(field: str, metric: str, a: object, b: object) -> None:
    if a != b:
        raise UsageError(field, b, f"of {metric!r}, but {a!r} before: not the same was measured")


def _commits(results: Iterable[Result]) -> str:
    return ", ".join(sorted({result.commit for result in results}))
