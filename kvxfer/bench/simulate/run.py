"""`kvxfer bench simulate`: from options to tables, figures and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.console import Console

from kvxfer.bench.record import command_line
from kvxfer.bench.report import Figure, describe_machine, write_figures
from kvxfer.bench.serving.prompts import Shape, make_shapes, read_trace
from kvxfer.bench.serving.screen import Screen
from kvxfer.bench.simulate.costs import Costs, assume, read_costs
from kvxfer.bench.simulate.options import SimulateOptions
from kvxfer.bench.simulate.report import Outcome, figures, outcome
from kvxfer.bench.simulate.screen import show_outcome, show_splits
from kvxfer.bench.simulate.shape import ClusterShape
from kvxfer.bench.simulate.sweep import Split, splits_of


def run_simulate(options: SimulateOptions) -> int:
    """Compute, print, write; 1 where a request was refused. Raises KvxferError."""
    options.check()
    costs = assume(read_costs(options.costs), options.assume)
    shape, console = options.shape(costs), Console(highlight=False)
    console.print(f"{_command(options)}\ncosts: {costs.what}", markup=False, soft_wrap=True)
    splits = _splits(options, shape, costs)
    if options.find_ratio:
        show_splits(console, splits, bool(options.goodput))
    else:
        show_outcome(console, splits[0].outcome)
    if options.plot is not None:
        from kvxfer.bench.simulate.plot import draw

        draw(splits, _command(options), options.plot)
    if options.json is not None:
        machine = f"simulated: {costs.what}; on {describe_machine('cpu')}"
        write_figures(options.json, _figures(splits), _command(options), machine)
    return 1 if any(one.outcome.num_refused for one in splits) else 0


def simulate_once(
    shape: ClusterShape,
    costs: Costs,
    load: Sequence[Shape],
    seed: int,
    limits_ms: Mapping[str, float],
    step: Callable[[], None] = lambda: None,
) -> Outcome:
    """`step` is called with each request that is over. The same arguments give the same numbers."""
    from kvxfer.bench.simulate.cluster import Cluster

    cluster = Cluster(shape, costs, seed)
    cluster.on_end = step
    return outcome(cluster, cluster.run(load), limits_ms)


def _splits(options: SimulateOptions, shape: ClusterShape, costs: Costs) -> list[Split]:
    """One, or all that --find-ratio tries."""
    load = options.load()
    trace = read_trace(options.trace) if options.trace is not None else []
    shapes = make_shapes(load, trace, 2, 0)  # of the tokens nothing is asked
    workers, screen, found = shape.prefill + shape.decode, Screen(), []
    counts = splits_of(workers, options.steps) if options.find_ratio else [shape.prefill]
    for prefill in counts:
        divided = replace(shape, prefill=prefill, decode=workers - prefill)
        with screen.bar(f"{prefill} : {workers - prefill}", len(shapes)) as step:
            one = simulate_once(divided, costs, shapes, load.seed, load.limits_ms(), step)
        found.append(Split(prefill, workers - prefill, one))
    return found


def _figures(splits: Sequence[Split]) -> list[Figure]:
    return [
        row
        for one in splits
        for row in figures(one.outcome, f"simulated, {one.prefill} : {one.decode}")
    ]


def _command(options: SimulateOptions) -> str:
    return command_line("simulate", options).replace("--find-ratio True", "--find-ratio")
