"""What a run of `kvxfer bench connectors` shows a person: how far it is, and a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from kvxfer.bench.connectors.columns import COLUMNS, HIDDEN, LEGEND, fitting
from kvxfer.bench.connectors.report import Ceiling, Report, Row
from kvxfer.bench.connectors.sweep import Trial
from kvxfer.bench.connectors.values import size_text

WIDE = 240
"""Characters of a line where nobody says how many there are: in a file or a pipe."""


class Screen:
    """A bar while it is entered; lines and the table stand above it."""

    def __init__(self, num_steps: int) -> None:
        self._console = Console(highlight=False)
        if not self._console.is_terminal and "COLUMNS" not in os.environ:
            self._console = Console(highlight=False, width=WIDE)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=num_steps)

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, trial: Trial) -> Callable[[], None]:
        """What is returned takes a step."""
        kind = trial.kind
        words = f"{kind.connector} {kind.operation} {kind.batch} × {size_text(kind.block_bytes)}"
        self._progress.update(self._task, description=escape(words))
        return lambda: self._progress.advance(self._task)

    def skip(self, num_steps: int) -> None:
        self._progress.advance(self._task, num_steps)

    def say(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    def show(self, report: Report) -> None:
        self._progress.stop()
        if report.rows:
            self._console.print(_table(report.rows, self._console.width))
            for line in (*LEGEND, *_left_out(report.rows, self._console.width)):
                self.say(line)
        self.say(f"{report.machine}: {_ceilings(report.ceilings)}")
        for row in report.rows:
            if row.problem:
                kind = row.kind
                size = f"{kind.batch} × {size_text(kind.block_bytes)}"
                self.say(f"{kind.connector} {kind.operation} {size}: {row.problem}")
        for problem in report.problems:
            self.say(problem)
        if not report.is_complete:
            self.say("NOT COMPLETE: what is shown was found before it went wrong.")


def _table(rows: Sequence[Row], width: int) -> Table:
    table = Table()
    columns = fitting(list(rows), width)
    for column in columns:
        table.add_column(
            column.title, justify="right" if column.is_number else "left", no_wrap=True
        )
    before: Row | None = None
    for row in rows:
        if before is not None and before.kind.connector != row.kind.connector:
            table.add_section()
        style = "red" if row.problem else None
        table.add_row(*(escape(column.cell(row)) for column in columns), style=style)
        before = row
    return table


def _left_out(rows: Sequence[Row], width: int) -> list[str]:
    shown = fitting(list(rows), width)
    hidden = [one.title for one in COLUMNS if one.rank < HIDDEN and one not in shown]
    if not hidden:
        return []
    return [f"No room for {', '.join(hidden)}: in a wider terminal, or with --csv FILE."]


def _ceilings(ceilings: Sequence[Ceiling]) -> str:
    found = (f"{one.name} {one.gb_per_s.median:.3g} GB/s" for one in ceilings)
    return ", ".join(found) or "no ceiling was measured"
