"""What a sweep shows a person: how far it is, and a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvxfer.bench.transfer_shapes import size_name
from kvxfer.bench.transfer_sweep import Row


class SweepScreen:
    """A bar while it is entered; lines and the table stand above it."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )

    def __enter__(self) -> SweepScreen:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def begin(self, lane: str, num_runs: int) -> Callable[[], None]:
        """A bar of `num_runs` steps; what is returned takes one."""
        task = self._progress.add_task(escape(lane), total=num_runs)
        return lambda: self._progress.advance(task)

    def say(self, text: str) -> None:
        self._console.print(escape(text))

    def show(self, rows: Sequence[Row], sizes: Sequence[int], title: str) -> None:
        table = Table(
            show_lines=True, title=f"GB/s, and the share of a contiguous copy: {escape(title)}"
        )
        table.add_column("runs of", no_wrap=True)
        for size in sizes:
            table.add_column(size_name(size), justify="right")
        for row in rows:
            cells = [f"{row.gbps[size]:.3g}\n{100 * row.shares[size]:.0f} %" for size in sizes]
            table.add_row(row.lane, *cells)
        self._console.print(table)
