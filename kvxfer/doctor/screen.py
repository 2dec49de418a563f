"""The findings of `kvxfer doctor`, for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvxfer.telemetry.checks import Check, Status

_MARKS: Mapping[Status, str] = {
    "ok": "[green]ok[/green]",
    "warn": "[yellow]warn[/yellow]",
    "fail": "[bold red]fail[/bold red]",
}


def show(found: Mapping[str, Sequence[Check]], console: Console | None = None) -> None:
    """A table of every section, then one line that counts what is not ok."""
    console = console or Console(highlight=False)
    for name, checks in found.items():
        table = Table(title=escape(name), title_justify="left", box=None, pad_edge=False)
        for column in ("", "what", "found", "next, or why"):
            table.add_column(column, overflow="fold")
        for check in checks:
            cells = (check.name, check.value, check.hint)
            table.add_row(_MARKS[check.status], *(escape(cell) for cell in cells))
        console.print(table)
        console.print()
    console.print(verdict(found))


def verdict(found: Mapping[str, Sequence[Check]]) -> str:
    every = [check for checks in found.values() for check in checks]
    fails = [check.name for check in every if check.status == "fail"]
    warns = [check.name for check in every if check.status == "warn"]
    if fails:
        return f"kvxfer cannot run as it should: {', '.join(fails)}"
    if warns:
        return f"kvxfer runs here; worth a look: {', '.join(warns)}"
    return "all is well"
