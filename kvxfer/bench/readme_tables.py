"""The performance section of README.md as text. Pure: from figures to Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvxfer.bench.connectors.naming import digits_of, size_name
from kvxfer.bench.readme_parts import Counts, Line, Matrix, Table, Theme
from kvxfer.bench.readme_themes import THEMES
from kvxfer.bench.results import Result
from kvxfer.errors import UsageError

Results = Mapping[str, Sequence[Result]]
"""Figures by the name of their file, without its suffix."""
Used = list[tuple[str, Result]]
Part = tuple[str, Used]
"""A table, and the figures in it with their files."""
INTRODUCTION = (
    "Written by `kvxfer bench readme` from `tests/bench/results/*.json`, where every figure is, "
    "with its versions. Medians ± the distance between quartiles; a bar is what was aimed at "
    "before measuring, and **missed** says that the figure does not reach it."
)
DIGITS, ALL_DIGITS = 3, 17
"""That are shown, and that tell all numbers apart."""
_YES_OR_NO = ("0/1", "1 = yes")
_SAID = (*_YES_OR_NO, "1", "bytes", "of positions")
"""Units that the number or the label tells."""


@dataclass(slots=True)
class Shown:
    """What is in the section so far, to tell what is not. Files, and metrics of files."""

    figures: set[tuple[str, str]] = field(default_factory=set)

    def add(self, file: str, results: Iterable[Result]) -> None:
        self.figures.update((file, result.metric) for result in results)

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.figures}


def section_of(results: Results, themes: Sequence[Theme] = THEMES) -> str:
    """The whole section. Files that no theme names follow with the figures that have a bar (all,
    where none has), then every missed bar that is in no table."""
    shown = Shown()
    parts = [INTRODUCTION]
    for theme in themes:
        tables = [_table(table, results, shown) for table in theme.tables]
        parts += [_chapter(theme.title, theme.text, tables)]
    if others := sorted(results.keys() - shown.files):
        tables = [_all_of(file, results[file], shown) for file in others]
        parts.append(_chapter("Also measured", "", tables))
    missed = {
        file: [one for one in found if not one.ok and (file, one.metric) not in shown.figures]
        for file, found in results.items()
    }
    if any(missed.values()):
        parts.append(_chapter("Other bars that were missed", "", [_list_of(missed, shown)]))
    return "\n\n".join(parts)


def _chapter(title: str, text: str, tables: Sequence[Part]) -> str:
    used = [one for _, figures in tables for one in figures]
    parts = [f"### {title}", text, *(table for table, _ in tables), _sources(used)]
    return "\n\n".join(part for part in parts if part)


def _table(table: Table, results: Results, shown: Shown) -> Part:
    if isinstance(table, Matrix):
        return _matrix(table, results, shown)
    if isinstance(table, Counts):
        return _counts(table, results, shown)
    rows: list[list[str]] = []
    used: Used = []
    for line in table.lines:
        found = _matching(line, results)
        shown.add(line.file, found)
        used += [(line.file, result) for result in found]
        rows += [_row(_label(line, one), one) for one in found]
    return _markdown(("what", "found", "bar"), rows), used


def _label(line: Line, result: Result) -> str:
    match = re.fullmatch(line.metric, result.metric)
    assert match is not None, "only what matches is shown"
    return match.expand(line.label)


def _matrix(table: Matrix, results: Results, shown: Shown) -> Part:
    used: Used = []
    cells: list[list[Result | None]] = []
    for line in table.lines:
        by_metric = {result.metric: result for result in _of_file(line.file, results)}
        cells.append([by_metric.get(line.metric.format(size=size)) for size in table.sizes])
        found = [cell for cell in cells[-1] if cell is not None]
        if not found:
            raise _nothing(line)
        shown.add(line.file, found)
        used += [(line.file, result) for result in found]
    kept = [index for index, column in enumerate(zip(*cells, strict=True)) if any(column)]
    rows = [
        [line.label, *("" if (cell := row[index]) is None else _cell(cell) for index in kept)]
        for line, row in zip(table.lines, cells, strict=True)
    ]
    names = [re.sub(r"(?<=[0-9])(?=[KM]iB)", " ", table.sizes[index]) for index in kept]
    return _markdown((table.caption, *names), rows), used


def _counts(table: Counts, results: Results, shown: Shown) -> Part:
    rows: list[list[str]] = []
    used: Used = []
    for line in table.lines:
        by_metric = {result.metric: result for result in _of_file(line.file, results)}
        missing = [name for name in table.columns if f"{line.metric}: {name}" not in by_metric]
        if missing:
            raise _nothing(Line(line.file, f"{line.metric}: {missing[0]}", line.label))
        cells = [by_metric[f"{line.metric}: {name}"] for name in table.columns]
        shown.add(line.file, cells)
        used += [(line.file, result) for result in cells]
        rows.append([line.label, *(_number(cell) + _missed(cell) for cell in cells)])
    return _markdown(("campaign", *table.columns), rows), used


def _all_of(file: str, found: Sequence[Result], shown: Shown) -> Part:
    with_bar = [result for result in found if result.bar is not None]
    return _list_of({file: with_bar or list(found)}, shown)


def _list_of(results: Results, shown: Shown) -> Part:
    rows: list[list[str]] = []
    used: Used = []
    for file, found in results.items():
        shown.add(file, found)
        used += [(file, result) for result in found]
        rows += [_row(result.metric, result) for result in found]
    return _markdown(("what", "found", "bar"), rows), used


def _matching(line: Line, results: Results) -> list[Result]:
    found = [one for one in _of_file(line.file, results) if re.fullmatch(line.metric, one.metric)]
    if not found:
        raise _nothing(line)
    return found


def _of_file(file: str, results: Results) -> Sequence[Result]:
    if file not in results:
        raise UsageError("results", f"{file}.json", "is missing, and README.md shows its figures")
    return results[file]


def _nothing(line: Line) -> UsageError:
    reason = f"has no figure {line.metric!r}, and README.md shows it"
    return UsageError("results", f"{line.file}.json", reason)


def _row(label: str, result: Result) -> list[str]:
    return [label, _found(result), _bar(result)]


def _found(result: Result) -> str:
    unit = f" {result.unit}" if result.unit and result.unit not in _SAID else ""
    return _number(result) + _spread(result) + unit


def _cell(result: Result) -> str:
    bar = "" if result.bar is None else f" ({_bar(result)})"
    return _number(result) + _spread(result) + bar


def _spread(result: Result) -> str:
    return f" ± {digits_of(result.spread_iqr, 2)}" if result.spread_iqr else ""


def _bar(result: Result) -> str:
    if result.bar is None:
        return ""
    if result.unit in _YES_OR_NO:
        return "yes" + _missed(result)
    sign = "≥" if result.better == "higher" else "≤"
    return f"{sign} {_plain(result.bar, result.unit, _digits(result))}{_missed(result)}"


def _missed(result: Result) -> str:
    return "" if result.ok else " **missed**"


def _number(result: Result) -> str:
    return _plain(result.value, result.unit, _digits(result))


def _digits(result: Result) -> int:
    """Of value and bar: so many that a bar which was missed does not look reached."""
    if result.ok or result.bar is None:
        return DIGITS
    unit = result.unit
    for digits in range(DIGITS, ALL_DIGITS):
        if _plain(result.value, unit, digits) != _plain(result.bar, unit, digits):
            return digits
    return ALL_DIGITS


def _plain(value: float, unit: str, digits: int) -> str:
    if unit in _YES_OR_NO:
        return "yes" if value == 1 else "no"
    if unit == "bytes":
        return size_name(value) if digits < ALL_DIGITS else f"{value:,} bytes"
    return digits_of(value, digits)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_escaped(cell) for cell in line) + " |" for line in lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _sources(used: Used) -> str:
    """Which command gave them, of which commit, on what, and where they are: each once."""
    files: dict[str, dict[str, None]] = {}
    for file, one in used:
        line = f"`{one.command}`: {one.machine}, commit {_short(one.commit)}"
        files.setdefault(line, {})[f"`{file}.json`"] = None
    return "\n".join(f"- {line} ({', '.join(names)})" for line, names in files.items())


def _short(commit: str) -> str:
    name, dash, dirty = commit.partition("-")
    return f"{name[:10]}{dash}{dirty}" or "unknown"
