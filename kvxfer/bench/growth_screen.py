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

WIDTH = 60
"""Columns of the longest bar."""
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
        """Tables of medians with the distance between quartiles, and bars."""
        for what, names, where in PARTS:
            rows = [(found, getattr(found, where)) for found in every if getattr(found, where)]
            if rows:
                self._console.print(_table(f"{what}, ms: {self._title}", names, rows))
                self._bars(what, names, rows)
        if beside := [found for found in every if found.in_flight]:
            self._console.print(_in_flight(beside))

    def _bars(
        self, what: str, names: Sequence[str], rows: Sequence[tuple[Found, list[Steps]]]
    ) -> None:
        """One bar for each row, all to the scale of the longest."""
        medians = [median_steps(steps, names) for _, steps in rows]
        longest = max(total(one, names) for one in medians)
        legend = Text(f"{what}: ")
        for name, colour in zip(names, COLOURS, strict=False):
            legend.append(f"{mark(name)} {name}  ", style=colour)
        self._console.print(legend)
        label = max(len(found.name) for found, _ in rows)
        for (found, _), steps in zip(rows, medians, strict=True):
            text = Text(f"{found.name:<{label}} ")
            for name, colour, columns in bar(steps, names, longest):
                text.append(mark(name) * columns, style=colour)
            text.append(f" {total(steps, names):.3g} ms")
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
    table = Table(title=escape(f"{title} (median ± IQR)"))
    table.add_column("lane, size", no_wrap=True)
    is_up = names == GROW_STEPS
    for heading in (*names, *(("usable", "verified", "GB/s") if is_up else ("all",))):
        table.add_column(heading, justify="right")
    for found, every in rows:
        cells = [_cell([steps[name] for steps in every]) for name in names]
        if is_up:
            usable = [total(steps, USABLE) for steps in every]
            cells.append(_cell(usable))
        cells.append(_cell([total(steps, names) for steps in every]))
        if is_up:
            cells.append(f"{found.added_bytes / statistics.median(usable) / 1e6:.3g}")
        table.add_row(escape(found.name), *cells)
    return table


def _cell(samples: Sequence[float]) -> str:
    figure = Figure.of("", samples, "", "lower")
    return f"{figure.value:.3g}\n±{figure.spread_iqr:.2g}"


def _in_flight(rows: Sequence[Found]) -> Table:
    table = Table(title="verified transfers in flight, GB/s (median ± IQR)")
    for heading in ("lane, size", "without a growth", "during one", "ratio", "compared in all"):
        table.add_column(heading, justify="left" if heading == "lane, size" else "right")
    for found in rows:
        during = [rate for one in found.in_flight for rate in one.during]
        others = [rate for one in found.in_flight for rate in one.others]
        ratios = [one.ratio for one in found.in_flight if one.during]
        cells = [_cell(others), _cell(during) if during else "–", _cell(ratios) if ratios else "–"]
        table.add_row(escape(found.name), *cells, str(found.num_verified))
    return table
