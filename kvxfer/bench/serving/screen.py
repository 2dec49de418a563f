"""How far a run is, on stderr: the results stay alone on stdout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Screen:
    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        self._console.print(escape(text), style="dim", soft_wrap=True)

    @contextmanager
    def bar(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar of `total` steps; what is yielded takes one. Gone with the context."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *columns, TimeElapsedColumn(), console=self._console, transient=True
        ) as progress:
            task = progress.add_task(escape(name), total=total)
            yield lambda: progress.advance(task)
