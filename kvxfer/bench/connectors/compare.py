"""Two reports of `kvxfer bench connectors`: what became slower, and what quicker."""

from __future__ import annotations

from pathlib import Path

from kvxfer.bench.comparison import Change, Comparison, Outcome, show
from kvxfer.bench.connectors.naming import split_names
from kvxfer.bench.connectors.report import Kind, Report, Row, read_report
from kvxfer.bench.noise import judge
from kvxfer.errors import UsageError


def compare_reports(a: Path, b: Path, as_json: bool) -> int:
    """Print what became of `a` in `b`, kind by kind; exit code 1 where anything got worse.

    A kind is judged by its GB/s: more apart than the sum of both interquartile ranges and than 5 %
    (kvxfer.bench.noise has the reasons). Where both runs have the kind's share of the same ceiling,
    that must differ as well, by the same rule and to the same side. The two of a share are measured
    right after each other, so what slows the whole machine, which no run's ranges show, leaves the
    share as it is: such a change is told, and is neither regression nor gain.

    A kind that `a` has as a whole and `b` with a problem is broken, which counts as a regression: a
    connector that fails is no better than a slow one. Other rows with a problem, and all that only
    one has, are named. Of a report that is not complete what both have is compared, with a warning.

    Raises UsageError for what is no report, for runs that differ in what was measured (format,
    machine, settings), and where no kind is in both. Commits and versions may differ: they are
    what is compared.
    """
    return show(comparison_of(a, read_report(a), b, read_report(b)), as_json)


def comparison_of(a_path: Path, a: Report, b_path: Path, b: Report) -> Comparison:
    """Pure. Raises as compare_reports."""
    _check_same(a_path, a, b_path, b)
    before, after = _rows(a_path, a), _rows(b_path, b)
    both = [kind for kind in before if kind in after]
    if not both:
        raise UsageError("rows", str(b_path), f"has no kind in common with {a_path}")
    is_whole = {kind: not (before[kind].problem or after[kind].problem) for kind in both}
    broken = [kind for kind in both if after[kind].problem and not before[kind].problem]
    told = [kind for kind in both if is_whole[kind] or kind in broken]
    common, names = split_names(told)
    _, full = split_names([*before, *after])
    name_of = dict(zip([*before, *after], full, strict=True))
    return Comparison(
        str(a_path),
        str(b_path),
        (a.commit, b.commit),
        [_change(name, before[kind], after[kind]) for kind, name in zip(told, names, strict=True)],
        common=common,
        only_a=[name_of[kind] for kind in before if kind not in after],
        only_b=[name_of[kind] for kind in after if kind not in before],
        warnings=[
            *_partial("A", a),
            *_partial("B", b),
            *(
                f"not compared: {name_of[kind]}: "
                f"{before[kind].problem or 'whole'} (A), {after[kind].problem or 'whole'} (B)"
                for kind in both
                if not is_whole[kind] and kind not in broken
            ),
        ],
    )


def _check_same(a_path: Path, a: Report, b_path: Path, b: Report) -> None:
    _refuse_difference("format", a_path, a.format, b_path, b.format)
    _refuse_difference("machine", a_path, a.machine, b_path, b.machine)
    for name in sorted({*a.settings, *b.settings}):
        ours, theirs = a.settings.get(name), b.settings.get(name)
        _refuse_difference(f"settings.{name}", a_path, ours, b_path, theirs)


def _refuse_difference(field: str, a_path: Path, a: object, b_path: Path, b: object) -> None:
    if a != b:
        raise UsageError(
            field, b, f"in {b_path}, but {a!r} in {a_path}: they did not measure the same"
        )


def _rows(path: Path, report: Report) -> dict[Kind, Row]:
    rows = {row.kind: row for row in report.rows}
    if len(rows) != len(report.rows):
        twice = next(kind for kind in rows if sum(row.kind == kind for row in report.rows) > 1)
        raise UsageError("rows", str(path), f"has one kind twice: {split_names([twice])[1][0]}")
    return rows


def _partial(name: str, report: Report) -> list[str]:
    if report.is_complete:
        return []
    why = "; ".join(report.problems) or "it does not say why"
    return [f"{name} is not complete, what both have is compared: {why}"]


def _change(name: str, before: Row, after: Row) -> Change:
    if after.problem:
        return Change(name, "GB/s", before.gb_per_s, after.gb_per_s, "broken", after.problem)
    found: Outcome = judge(before.gb_per_s, after.gb_per_s, "higher")
    note = ""
    if before.ceiling and before.ceiling == after.ceiling:
        note = f"share {before.share.median:.3f} → {after.share.median:.3f}"
        if found != "same" and judge(before.share, after.share, "higher") != found:
            found = "machine"
    return Change(name, "GB/s", before.gb_per_s, after.gb_per_s, found, note)
