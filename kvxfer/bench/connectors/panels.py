"""Which rows of a report are drawn together, as which lines, over what. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvxfer.bench.connectors.report import Ceiling, Kind, Report, Row
from kvxfer.bench.connectors.words import FIELDS, size_name, split_names

Axis = Literal["block_bytes", "batch", "chunk_bytes"]
AXES: dict[Axis, str] = {
    "block_bytes": "block size",
    "batch": "blocks of a transfer",
    "chunk_bytes": "chunk size",
}
_OF_A_LINE = ("connector", "operation", "mode")


@dataclass(frozen=True, slots=True)
class Line:
    """Rows of one connector, operation and mode, measured at least once, by ascending x."""

    kind: Kind
    name: str
    rows: list[Row]


@dataclass(frozen=True, slots=True)
class Panel:
    """What may be compared by eye: all that differs is the line, and x."""

    title: str
    axis: Axis
    lines: list[Line]
    ceilings: list[Ceiling]
    """Those that the lines' shares are of."""

    @property
    def ticks(self) -> list[int]:
        return sorted({self.x_of(row) for line in self.lines for row in line.rows})

    @property
    def axis_name(self) -> str:
        return AXES[self.axis]

    def x_of(self, row: Row) -> int:
        return _on(self.axis, row)

    def tick_name(self, x: int) -> str:
        return f"{x:,}" if self.axis == "batch" else size_name(x)


def _on(axis: Axis, row: Row) -> int:
    return int(getattr(row.kind, axis))


def panels_of(report: Report) -> list[Panel]:
    """In the order of the rows. x is what was swept: block size if that was, else the first that
    was."""
    rows = [row for row in report.rows if row.runs]
    axis: Axis = next(
        (name for name in AXES if len({_on(name, row) for row in rows}) > 1), "block_bytes"
    )
    fixed = [name for name in FIELDS if name not in (*_OF_A_LINE, axis)]
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row.kind, name) for name in fixed), []).append(row)
    return [_panel(group, axis, fixed, report) for group in groups.values()]


def _panel(rows: list[Row], axis: Axis, fixed: list[str], report: Report) -> Panel:
    lines: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        lines.setdefault(tuple(getattr(row.kind, name) for name in _OF_A_LINE), []).append(row)
    has_modes = len({row.kind.mode for row in rows}) > 1
    title, _ = split_names([rows[0].kind], fixed)
    named = {row.ceiling for row in rows}
    return Panel(
        title,
        axis,
        [
            Line(kind, _line_name(kind, has_modes), sorted(found, key=lambda row: _on(axis, row)))
            for found in lines.values()
            for kind in [found[0].kind]
        ],
        [one for one in report.ceilings if one.name in named],
    )


def _line_name(kind: Kind, with_mode: bool) -> str:
    return f"{kind.connector} {kind.operation}" + (f", {kind.mode}" if with_mode else "")
