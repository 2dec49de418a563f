"""`kvxfer bench simulate` and what belongs to it. Each imports what it runs when it runs."""

from __future__ import annotations

import cyclopts

from kvxfer.bench.simulate.options import CalibrateOptions, SimulateOptions

HELP = """Simulate many workers, on costs that were measured: where a load waits, and for what.

A discrete-event model of a router, prefill and decode workers, links and caches, with the load of
`kvxfer bench serving`. It tells times and rates, how busy each kind of thing was, and what binds.
What prompts have in common is not modelled, nor are failures.

Which load is too much for 2 and 2 workers, and what is it that binds?

    kvxfer bench simulate --prefill 2 --decode 2 --request-rate 20 --random-input-len 4096

Which ratio of 16 workers serves this trace best, with a first token in 2 s and 20 tokens a second?

    kvxfer bench simulate --prefill 8 --decode 8 --trace trace.jsonl --find-ratio
    --goodput ttft:2000 tpot:50 --plot ratio.svg

A thousand workers, over network cards of 50 GB/s, if the router's choice cost nothing:

    kvxfer bench simulate --prefill 500 --decode 500 --routers 100 --request-rate 1000
    --num-prompts 3000 --random-input-len 4096 --random-output-len 64
    --assume lane_bytes_per_s=50e9 place_pair_s=0 place_worker_s=0

`simulate costs` shows what each number is and where it comes from; `simulate calibrate` measures
them on this machine, `simulate validate` says how far the model is from a real service here."""

simulate = cyclopts.App(name="simulate", help=HELP)


@simulate.default
def run(options: SimulateOptions = SimulateOptions()) -> int:  # noqa: B008
    """See the help of the command."""
    from kvxfer.bench.simulate.run import run_simulate

    return run_simulate(options)


@simulate.command
def costs(options: SimulateOptions = SimulateOptions()) -> int:  # noqa: B008
    """Show a file of costs: each number, and where it comes from.

    Example: kvxfer bench simulate costs --costs costs.json
    """
    from rich.console import Console

    from kvxfer.bench.simulate.costs import assume, read_costs
    from kvxfer.bench.simulate.screen import show_costs

    show_costs(Console(highlight=False), assume(read_costs(options.costs), options.assume))
    return 0


@simulate.command
def calibrate(options: CalibrateOptions = CalibrateOptions()) -> int:  # noqa: B008
    """Measure what everything costs on this machine, on one real `kvxfer serve`, and keep it.

    One prefill and one decode worker of one thread each; about a minute.
    Example: kvxfer bench simulate calibrate --out costs.json
    """
    from kvxfer.bench.simulate.calibrate import run_calibrate

    return run_calibrate(options)


@simulate.command
def validate(options: CalibrateOptions = CalibrateOptions()) -> int:  # noqa: B008
    """Give a real service loads that were not used to fit the costs, and the model the same.

    The figures are how far the model is off, relative to the real service: time to the first token
    at the median, and throughput. Exit code 1 beyond 15 %.
    Example: kvxfer bench simulate validate --json tests/bench/results/scale-simulate.json
    """
    from kvxfer.bench.simulate.validate import run_validate

    return run_validate(options)
