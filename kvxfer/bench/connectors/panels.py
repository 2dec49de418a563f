"""Which rows of a report are drawn together, as which lines, over what. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvxfer.bench.connectors.naming import FIELDS, size_name, split_names
from kvxfer.bench.connectors.report import Kind, Report, Row, Spread

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
class CeilingLine:
    """What the machine itself could do, by ascending x."""

    name: str
    points: list[tuple[int, Spread]]


@dataclass(frozen=True, slots=True)
class Panel:
    """What may be compared by eye: all that differs is the line, and x."""

    title: str
    axis: Axis
    lines: list[Line]
    ceilings: list[CeilingLine]

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
    axis: Axis = next((name for name in AXES if _is_swept(name, rows)), "block_bytes")
    fixed = [name for name in FIELDS if name not in (*_OF_A_LINE, axis)]
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row.kind, name) for name in fixed), []).append(row)
    return [_panel(group, axis, fixed, report) for group in groups.values()]


def _is_swept(axis: Axis, rows: list[Row]) -> bool:
    """Over several values, all above 0: chunks of 0 are fixed memory, on no scale with others."""
    found = {_on(axis, row) for row in rows}
    return len(found) > 1 and 0 not in found


def _panel(rows: list[Row], axis: Axis, fixed: list[str], report: Report) -> Panel:
    lines: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        lines.setdefault(tuple(getattr(row.kind, name) for name in _OF_A_LINE), []).append(row)
    has_modes = len({row.kind.mode for row in rows}) > 1
    title, _ = split_names([rows[0].kind], fixed)
    return Panel(
        title,
        axis,
        [
            Line(kind, _line_name(kind, has_modes), sorted(found, key=lambda row: _on(axis, row)))
            for found in lines.values()
            for kind in [found[0].kind]
        ],
        _ceilings(rows, axis, report),
    )


def _ceilings(rows: list[Row], axis: Axis, report: Report) -> list[CeilingLine]:
    """Those that the rows' shares are of, and those that no row's is of, such as a socket's on one
    machine. A name that ends in a size (memcpy of 4MiB) counts where rows name that size, and the
    sizes make up one line."""
    sizes: dict[int, set[str]] = {}
    for row in rows:
        sizes.setdefault(_on(axis, row), set()).add(_split(row.ceiling)[1])
    own = {_split(row.ceiling)[0] for row in rows}
    others = {_split(row.ceiling)[0] for row in report.rows} - own
    lines: dict[str, list[tuple[int, Spread]]] = {}
    for ceiling in report.ceilings:
        name, size = _split(ceiling.name)
        if name in others:
            continue
        for x in sorted(sizes):
            if not size or size in sizes[x]:
                lines.setdefault(name, []).append((x, ceiling.gb_per_s))
    return [
        CeilingLine(name, sorted(points, key=lambda one: one[0])) for name, points in lines.items()
    ]


def _split(ceiling: str) -> tuple[str, str]:
    """What it is, and of which size."""
    name, _, size = ceiling.rpartition(" of ")
    return (name, size) if name else (size, "")


def _line_name(kind: Kind, with_mode: bool) -> str:
    return f"{kind.connector} {kind.operation}" + (f", {kind.mode}" if with_mode else "")
