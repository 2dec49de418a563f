"""What a simulation came to, for a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvxfer.bench.serving.results import unit
from kvxfer.bench.simulate.costs import NAMES, Costs
from kvxfer.bench.simulate.report import Outcome
from kvxfer.bench.simulate.sweep import Split, best_of

ROWS = ("ttft", "tpot", "e2el")
COLUMNS = ("mean", "p50", "p90", "p99")
BUSY = 0.9
"""A share above which something has no room to speak of."""


def show_outcome(console: Console, found: Outcome) -> None:
    times = Table(title="times, ms")
    times.add_column("")
    for name in COLUMNS:
        times.add_column(name, justify="right")
    for name in ROWS:
        cells = [found.summary.get((name, what)) for what in COLUMNS]
        times.add_row(name, *("-" if one is None else f"{one:.4g}" for one in cells))
    console.print(times)
    for (name, what), value in found.summary.items():
        if name in ("throughput", "goodput"):
            console.print(f"{name}, {what}: {value:.4g} {unit(name, what)}")
    for name, count in found.counts.items():
        if count:
            console.print(f"{name}: {count}")
    uses = Table(title="how busy, as a share of what there is")
    uses.add_column("")
    uses.add_column("mean", justify="right")
    uses.add_column("busiest one", justify="right")
    for use in found.uses:
        is_binding = use is found.binding
        style = "bold red" if is_binding and use.mean >= BUSY else "bold" if is_binding else None
        uses.add_row(use.name, f"{use.mean:.1%}", f"{use.most:.1%}", style=style)
    console.print(uses)
    binding = found.binding
    if binding.mean >= BUSY:
        console.print(f"what binds: {binding.name}, {binding.mean:.0%} busy", style="bold red")
    else:
        text = f"nothing binds at this load; the busiest is {binding.name}, at {binding.mean:.0%}"
        console.print(text)


def show_splits(console: Console, splits: Sequence[Split], has_limits: bool) -> None:
    """A row for each way to divide the workers; the best one stands out."""
    table = Table(title="which ratio serves this load")
    heads = ("P : D", "ttft p50 ms", "ttft p99 ms", "tpot p50 ms", "requests /s", "busiest")
    for name in (*heads, *["goodput /s"] * has_limits):
        table.add_column(name, justify="left" if name == "busiest" else "right")
    best = best_of(splits)
    for one in splits:
        get = one.outcome.summary.get
        cells = [("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("throughput", "requests")]
        texts = [f"{get(key, float('nan')):.4g}" for key in cells]
        binding = one.outcome.binding
        row = [f"{one.prefill} : {one.decode}", *texts, f"{binding.name}, {binding.mean:.0%}"]
        if has_limits:
            row.append(f"{get(('goodput', 'requests'), 0.0):.4g}")
        table.add_row(*row, style="bold" if one is best else None)
    console.print(table)
    console.print(f"best: {best.prefill} prefill and {best.decode} decode workers", style="bold")


def show_costs(console: Console, costs: Costs) -> None:
    """Each with its source."""
    table = Table(title=costs.what)
    for name in ("cost", "value", "where it comes from"):
        table.add_column(name, justify="right" if name == "value" else "left")
    for name in NAMES:
        source = costs.sources.get(name, "default")
        table.add_row(name, f"{getattr(costs, name):.4g}", source)
    console.print(table)
