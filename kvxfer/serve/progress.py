"""How far the workers have come, while they start: a table that changes, or lines in a log."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table


class StartScreen:
    """On stderr. A context manager: outside of it, steps are shown no more."""

    def __init__(self, names: Sequence[str], console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._steps = dict.fromkeys(names, "starting")
        self._live: Live | None = None
        self._is_shown = False

    def __enter__(self) -> StartScreen:
        self._is_shown = True
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def step(self, name: str, text: str) -> None:
        """What a worker does now."""
        self._steps[name] = text
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif self._is_shown:
            self.say(f"{name}: {text}")

    def say(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    def close(self) -> None:
        """Idempotent."""
        self._is_shown = False
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        for name, text in self._steps.items():
            table.add_row(f"[bold]{escape(name)}[/bold]", f"[dim]{escape(text)}[/dim]")
        return table
