"""What all rounds of a run came to: figures, and a table for a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvxfer.bench.report import Figure
from kvxfer.bench.serving.metrics import Answer, Summary, failures

Better = Literal["higher", "lower"]
COMPARED = (
    ("ttft", "median"), ("tpot", "median"), ("itl", "median"), ("e2el", "median"),
    ("throughput", "output tokens"), ("goodput", "requests"),
)  # fmt: skip
"""Told as ratios, with what has percentiles."""
RATES = ("throughput", "goodput")
KV = ("KV transfers", "KV hand-over")


@dataclass
class Side:
    """One service's rounds."""

    name: str
    rounds: list[Summary] = field(default_factory=list)
    """Of those that were sent whole."""
    cut_short: list[Summary] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    """Requests, by kind; of all rounds."""
    details: dict[str, str] = field(default_factory=dict)
    """Of the first of each kind."""
    num_sent: int = 0
    num_limited: int = 0
    """Times that 429 was answered."""

    def add(self, answers: Sequence[Answer], summary: Summary, *, is_whole: bool) -> None:
        (self.rounds if is_whole else self.cut_short).append(summary)
        self.failed += failures(answers)
        for one in answers:
            if one.failure and one.detail:
                self.details.setdefault(one.failure, " ".join(one.detail.split()))
        self.num_sent += len(answers)
        self.num_limited += sum(one.num_limited for one in answers)

    @property
    def told(self) -> list[Summary]:
        """Rounds that figures are of: parts of rounds only where no whole one is there."""
        return self.rounds or self.cut_short

    @property
    def keys(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys(key for one in self.told for key in one))


@dataclass
class Results:
    """Of a run. `sides` in the order of the table's columns."""

    runs: int
    sides: list[Side]
    more: list[Figure] = field(default_factory=list)
    """Whatever else was measured."""

    def figures(self) -> list[Figure]:
        found = [figure for side in self.sides for figure in self._of(side)]
        if len(self.sides) == 2:
            found += ratios(*self.sides)
        return [*found, *self.more]

    def _of(self, side: Side) -> list[Figure]:
        head = f"serving, {side.name}"
        found = []
        for name, what in side.keys:
            samples = [one[name, what] for one in side.told if (name, what) in one]
            better: Better = "higher" if name in RATES else "lower"
            found.append(Figure.of(f"{head}: {name}, {what}", samples, unit(name, what), better))
        count = len(side.rounds)
        whole = [
            Figure.of(f"{head}: rounds that were whole", [count], "rounds", "higher", self.runs)
        ]
        num_failed = side.failed.total()
        what = f"{head}: of {side.num_sent} requests failed"
        found += [*whole, Figure.of(what, [num_failed], "requests", "lower", 0)]
        for kind, num in sorted(side.failed.items()):
            found.append(Figure.of(f"{head}: failed, {kind}", [num], "requests", "lower", 0))
        limited = Figure.of(f"{head}: answered 429", [side.num_limited], "times", "lower")
        return [*found, limited]


def ratios(first: Side, second: Side) -> list[Figure]:
    """Of `first` to `second`, round by round: neighbours in time. None where a round of `second`
    has 0 or nothing: what is left would be a choice."""
    found = []
    pairs = list(zip(first.rounds, second.rounds, strict=False))
    for name, what in first.keys:
        is_told = (name, what) in COMPARED or what.startswith("p")
        both = [(one[name, what], two.get((name, what), 0.0)) for one, two in pairs
                if (name, what) in one]  # fmt: skip
        if not is_told or name == "sent late" or not both or not all(two for _, two in both):
            continue
        samples = [one / two for one, two in both]
        better: Better = "higher" if name in RATES else "lower"
        metric = f"serving, {first.name} to {second.name}: {name}, {what}"
        found.append(Figure.of(metric, samples, "ratio", better))
    return found


def unit(name: str, what: str) -> str:
    if name in RATES:
        return "/s"
    if what.startswith("share"):
        return "ratio"
    return "MB" if what.startswith("size") else "ms"


def show(console: Console, results: Results) -> None:
    """The table, and below it what went wrong."""
    table = Table()
    table.add_column("median of rounds ± IQR")
    for side in results.sides:
        table.add_column(escape(side.name), justify="right")
    has_ratio = len(results.sides) == 2
    if has_ratio:
        table.add_column("ratio", justify="right")
        by_metric = {one.metric: one for one in ratios(*results.sides)}
        both = f"{results.sides[0].name} to {results.sides[1].name}"
    by_key = {figure.metric: figure for figure in results.figures()}
    for name, what in dict.fromkeys(key for side in results.sides for key in side.keys):
        cells = [_cell(by_key.get(f"serving, {one.name}: {name}, {what}")) for one in results.sides]
        if has_ratio:
            cells.append(_cell(by_metric.get(f"serving, {both}: {name}, {what}")))
        table.add_row(f"{name}, {what} [dim]{unit(name, what)}[/dim]", *cells)
    console.print(table)
    for side in results.sides:
        _show_failures(console, side, results.runs)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    spread = f" ± {figure.spread_iqr:.2g}" if figure.runs > 1 else ""
    return f"{figure.value:.4g}{spread}"


def _show_failures(console: Console, side: Side, runs: int) -> None:
    for kind, count in side.failed.most_common():
        detail = f": {side.details[kind]}" if kind in side.details else ""
        text = f"{side.name}: {count} of {side.num_sent} requests failed, {kind}{detail}"
        console.print(escape(text), style="red", soft_wrap=True)
    if len(side.rounds) < runs:
        whole = "what is told is of parts of rounds" if not side.rounds else "others are not told"
        text = f"{side.name}: {len(side.rounds)} of {runs} rounds were whole; {whole}"
        console.print(escape(text), style="red", soft_wrap=True)
    if side.num_limited:
        console.print(escape(f"{side.name}: answered 429 {side.num_limited} times"))
    if not any(name in KV for name, _ in side.keys):
        why = "nothing was handed over" if side.name == "single" else "not told by this service"
        console.print(escape(f"{side.name}: KV hand-over's share of TTFT: {why}"))
