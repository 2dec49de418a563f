"""What comparing two runs found: for a person, as a table, and for machines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvxfer.bench.connectors.naming import digits_of
from kvxfer.bench.connectors.report import Spread

Outcome = Literal["regression", "broken", "gain", "machine", "same"]
WORDS: dict[Outcome, tuple[str, str]] = {
    "regression": ("▼ regression", "bold red"),
    "broken": ("✕ broken", "bold red"),
    "gain": ("▲ gain", "bold green"),
    "machine": ("≈ not its share", "yellow"),
    "same": ("= within noise", "dim"),
}
BAD: tuple[Outcome, ...] = ("regression", "broken")


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that both runs measured. `broken`: the first did as a whole, the second did not;
    `machine`: its share of the ceiling did not change."""

    name: str
    unit: str
    a: Spread
    b: Spread
    outcome: Outcome
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.b.median / self.a.median if self.a.median else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of file `a`, measured first, with file `b`."""

    a: str
    b: str
    commits: tuple[str, str]
    changes: list[Change]
    common: str = ""
    """What is true of all changes, and left out of their names."""
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return 1 if self.count(*BAD) else 0

    def count(self, *outcomes: Outcome) -> int:
        return sum(change.outcome in outcomes for change in self.changes)

    def to_json(self) -> str:
        summary = {"regressions": self.count(*BAD), "gains": self.count("gain")}
        found = {**summary, **msgspec.to_builtins(self)}
        return msgspec.json.format(msgspec.json.encode(found), indent=1).decode()


def show(comparison: Comparison, as_json: bool, console: Console | None = None) -> int:
    """Print it; the exit code: 1 with a regression."""
    if as_json:
        print(comparison.to_json())
        return comparison.exit_code
    console = console or Console(highlight=False)
    for name, path, commit in zip(
        "AB", (comparison.a, comparison.b), comparison.commits, strict=True
    ):
        console.print(f"{name}: {escape(path)}  {escape(commit or 'commit unknown')}")
    for warning in comparison.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", soft_wrap=True)
    console.print(_table(comparison))
    for name, only in (("A", comparison.only_a), ("B", comparison.only_b)):
        for one in only:
            console.print(f"only in {name}: {escape(one)}", soft_wrap=True)
    console.print(
        f"{len(comparison.changes)} compared: {comparison.count(*BAD)} regressions, "
        f"{comparison.count('gain')} gains"
    )
    return comparison.exit_code


def _table(comparison: Comparison) -> Table:
    table = Table(title=escape(comparison.common) or None, title_justify="left")
    table.add_column("what", overflow="fold")
    for name in ("A", "B", "B / A"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("", overflow="fold")
    for change in comparison.changes:
        word, style = WORDS[change.outcome]
        ratio = "–" if change.ratio is None else f"{change.ratio:.3f}"
        table.add_row(
            escape(change.name),
            escape(f"{spread_text(change.a)} {change.unit}".rstrip()),
            escape(f"{spread_text(change.b)} {change.unit}".rstrip()),
            ratio,
            f"[{style}]{word}[/{style}]",
            escape(change.note),
        )
    return table


def spread_text(spread: Spread) -> str:
    """The median, with the quartiles' distance if there is any."""
    iqr = f" ± {digits_of(spread.iqr, 2)}" if spread.iqr else ""
    return digits_of(spread.median, 4) + iqr
