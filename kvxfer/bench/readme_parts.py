"""What README.md's performance section is made of: tables over kept figures, in themes."""

from __future__ import annotations

from dataclasses import dataclass

SIZES = ("4KiB", "16KiB", "64KiB", "256KiB", "1MiB", "2MiB")
"""Columns of tables over the size of a run, as metrics have them."""


@dataclass(frozen=True, slots=True)
class Line:
    """Figures of one file; in a matrix `metric` has {size}, and the rest is a plain name."""

    file: str
    metric: str
    label: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """A row for each line, a column for each size that any of them has."""

    caption: str
    lines: tuple[Line, ...]
    sizes: tuple[str, ...] = SIZES


@dataclass(frozen=True, slots=True)
class List:
    """A row for each figure that a line's pattern matches."""

    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """A row for each campaign, named by what its metrics begin with; a column for each count."""

    lines: tuple[Line, ...]
    columns: tuple[str, ...]


Table = Matrix | List | Counts


@dataclass(frozen=True, slots=True)
class Theme:
    title: str
    text: str
    tables: tuple[Table, ...]
