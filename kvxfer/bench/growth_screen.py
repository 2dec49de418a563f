"""What `kvxfer bench growth` shows a person: how far it is, tables, and the steps as bars."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from kvxfer.bench.growth_figures import PARTS, Found, Steps, median_steps, total
from kvxfer.bench.growth_steps import GROW_STEPS, USABLE
from kvxfer.bench.report import Figure

WIDTH = 50
"""Columns of the longest bar."""
NAME_WIDTH, COLUMN_WIDTH = 22, 18
"""Of a table's columns, with what is between them."""
COLOURS = ("blue", "green", "cyan", "yellow", "magenta", "red", "white", "bright_blue", "grey50")


class GrowthScreen:
    """A bar while it is entered; lines and tables stand above it."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._console = Console(highlight=False)
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            auto_refresh=self._console.is_terminal,
        )

    def __enter__(self) -> GrowthScreen:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, name: str, num_rounds: int) -> TaskID:
        return self._progress.add_task(escape(name), total=num_rounds)

    def advance(self, task: TaskID) -> None:
        self._progress.advance(task)

    def end(self, task: TaskID, found: Found) -> None:
        self._progress.remove_task(task)
        if found.grows:
            verified = Figure.of("", [total(one, GROW_STEPS) for one in found.grows], "", "lower")
            text = f"first verified transfer after {verified.value:.3g} ms, IQR"
            self.say(f"{found.name}: {text} {verified.spread_iqr:.2g} of {verified.runs}")

    def say(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    def show(self, every: Sequence[Found]) -> None:
        """Tables, as many beside each other as fit, and bars."""
        for what, names, where in PARTS:
            rows = [(found, getattr(found, where)) for found in every if getattr(found, where)]
            columns = max(1, (self._console.width - NAME_WIDTH) // COLUMN_WIDTH)
            for start in range(0, len(rows), columns):
                part = rows[start : start + columns]
                self._console.print(_table(f"{what}: {self._title}", names, part))
            if rows:
                self._bars(what, names, rows)
        if beside := [found for found in every if any(found.beside.values())]:
            self._console.print(_in_flight(beside))

    def _bars(
        self, what: str, names: Sequence[str], rows: Sequence[tuple[Found, list[Steps]]]
    ) -> None:
        """One bar of medians for each row, all to the scale of the longest, and the whole's."""
        medians = [median_steps(steps, names) for _, steps in rows]
        longest = max(total(one, names) for one in medians)
        legend = Text(f"{what}: ")
        for name, colour in zip(names, COLOURS, strict=False):
            legend.append(f"{mark(name)} {name}  ", style=colour)
        self._console.print(legend)
        label = max(len(found.name) for found, _ in rows)
        for (found, every), steps in zip(rows, medians, strict=True):
            text = Text(f"{found.name:<{label}} ")
            for name, colour, columns in bar(steps, names, longest):
                text.append(mark(name) * columns, style=colour)
            text.append(f" {statistics.median(_totals(every, names)):.3g} ms")
            self._console.print(text, soft_wrap=True)


def mark(step: str) -> str:
    """The letter of a step in a bar: another one for each of those that share one."""
    return "n" if step == "renew" else step[0]


def bar(steps: Steps, names: Sequence[str], longest: float) -> list[tuple[str, str, int]]:
    """(step, colour, columns) of a bar, of which WIDTH columns are `longest` ms. A column belongs
    to the step in which its middle lies, so that what is rounded away adds up to none."""
    found, end = [], 0.0
    taken = 0
    for name, colour in zip(names, COLOURS, strict=False):
        end += steps[name]
        columns = round(end / longest * WIDTH) - taken if longest else 0
        taken += columns
        found.append((name, colour, columns))
    return found


def _table(title: str, names: Sequence[str], rows: Sequence[tuple[Found, list[Steps]]]) -> Table:
    """A column for each lane and size."""
    table = Table(title=escape(title))
    table.add_column("ms, median ± IQR", no_wrap=True)
    for found, _ in rows:
        table.add_column(escape(f"{found.lane}\n{found.size_mib} MiB"), justify="right")
    for name in names:
        table.add_row(name, *(_cell([steps[name] for steps in every]) for _, every in rows))
    table.add_section()
    if names != GROW_STEPS:
        table.add_row("all", *(_cell(_totals(every, names)) for _, every in rows))
        return table
    table.add_row("until usable", *(_cell(_totals(every, USABLE)) for _, every in rows))
    table.add_row("until verified", *(_cell(_totals(every, names)) for _, every in rows))
    table.add_row("GB/s until usable", *(_rate(*row) for row in rows))
    return table


def _totals(every: Sequence[Steps], names: Sequence[str]) -> list[float]:
    return [total(steps, names) for steps in every]


def _rate(found: Found, every: Sequence[Steps]) -> str:
    size = found.woken_bytes if every is found.wakes else found.grown_bytes
    return f"{size / statistics.median(_totals(every, USABLE)) / 1e6:.3g}"


def _cell(samples: Sequence[float]) -> str:
    figure = Figure.of("", samples, "", "lower")
    return f"{figure.value:.3g} ±{figure.spread_iqr:.2g}"


def _in_flight(rows: Sequence[Found]) -> Table:
    table = Table(title="verified transfers in flight, GB/s, median ± IQR")
    for heading in ("lane, size", "who grows", "before, after", "during", "ratio"):
        table.add_column(heading, justify="right" if heading in ("during", "ratio") else "left")
    for found in rows:
        for who, every in found.beside.items():
            during = [rate for one in every for rate in one.during]
            others = [rate for one in every for rate in one.others]
            ratios = [one.ratio for one in every if one.during]
            cells = [_cell(samples) if samples else "–" for samples in (others, during, ratios)]
            table.add_row(escape(found.name), who, *cells)
    return table
