"""`kvxfer bench simulate validate`: how far the model is from a real service, on other loads.

None of these was used to fit the costs: other rates, lengths, prompts, and another ratio of prefill
to decode. The model gets the very requests that the service got, and is asked for the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from kvxfer.bench.record import command_line
from kvxfer.bench.report import Figure, describe_machine, write_figures
from kvxfer.bench.serving.options import ServingOptions
from kvxfer.bench.serving.prompts import Prompt, make_round
from kvxfer.bench.serving.screen import Screen
from kvxfer.bench.simulate.calibrate import (
    VOCABULARY,
    calibrate,
    model_of,
    real_shape,
    shapes_of,
)
from kvxfer.bench.simulate.costs import Costs, read_costs
from kvxfer.bench.simulate.options import CalibrateOptions, need_simpy
from kvxfer.bench.simulate.real import Observed, real_service
from kvxfer.bench.simulate.report import Outcome
from kvxfer.bench.simulate.run import simulate_once

BAR = 0.15
"""Of the real figure."""
SEED = 100


@dataclass(frozen=True, slots=True)
class Load:
    """One that is given to both."""

    name: str
    prefill: int
    decode: int
    rate: float
    """Requests a second; inf: as `most` lets them."""
    most: int
    """Requests under way; 0: any number."""
    num_input: int
    num_output: int
    per_s: float
    """Requests that come in a second, about: how many make a load of a given time."""

    def prompts(self, seconds: float, index: int) -> list[Prompt]:
        options = ServingOptions(
            base_url="http://x",
            num_prompts=max(8, round(self.per_s * seconds)),
            request_rate=self.rate,
            max_concurrency=self.most,
            random_input_len=self.num_input,
            random_output_len=self.num_output,
            random_range_ratio=0.5,
            seed=SEED,
        )
        return make_round(options, [], VOCABULARY, index)


LOADS = (
    Load("1 : 1, open loop, 3 /s", 1, 1, 3.0, 0, 600, 64, 3.0),
    Load("1 : 1, closed loop, 6 at once", 1, 1, math.inf, 6, 200, 100, 4.0),
    Load("1 : 2, closed loop, 8 at once", 1, 2, math.inf, 8, 300, 60, 5.0),
)
Row = dict[str, float]
"""By what was asked for: of one round."""


def run_validate(options: CalibrateOptions) -> int:
    """Measure, simulate, compare, print, write; 1 where a bar is missed. Raises KvxferError."""
    options.check()
    need_simpy()
    screen, console = Screen(), Console(highlight=False)
    costs = calibrate(options, screen) if options.costs is None else read_costs(options.costs)
    figures: list[Figure] = []
    for pair in dict.fromkeys((one.prefill, one.decode) for one in LOADS):
        with real_service(model_of(options), *pair, options.log_dir, screen.say) as service:
            for load in [one for one in LOADS if (one.prefill, one.decode) == pair]:
                rows = []
                for index in range(options.repeats):
                    prompts = load.prompts(options.seconds, index)
                    name = f"{load.name}, round {index + 1} of {options.repeats}"
                    with screen.bar(name, len(prompts)) as step:
                        real = service.load(load.name, prompts, load.most, step)
                    rows.append((measured(real), simulated(load, costs, real, index)))
                figures += compare(load.name, rows)
                if options.json is not None:
                    command = command_line("simulate validate", replace(options, json=None))
                    write_figures(options.json, figures, command, describe_machine("cpu"))
    _show(console, figures)
    return 0 if all(one.ok for one in figures) else 1


def measured(real: Observed) -> Row:
    tokens = sum(one.num_output for one in real.answers)
    return {
        "TTFT p50": float(np.median([one.ttft_ms for one in real.answers])),
        "TPOT p50": float(np.median([one.tpot_ms or 0.0 for one in real.answers])),
        "throughput": tokens / real.took_s,
    }


def simulated(load: Load, costs: Costs, real: Observed, seed: int) -> Row:
    shape = replace(real_shape(load.prefill, load.decode, costs), max_concurrency=load.most)
    return numbers(simulate_once(shape, costs, shapes_of(real), seed, {}))


def numbers(found: Outcome) -> Row:
    """As `measured` has them."""
    return {
        "TTFT p50": found.summary["ttft", "median"],
        "TPOT p50": found.summary["tpot", "median"],
        "throughput": found.summary["throughput", "output tokens"],
    }


def compare(name: str, rows: Sequence[tuple[Row, Row]]) -> list[Figure]:
    """Real and simulated, round by round, and how far these are from those."""
    found, head = [], f"simulate, {name}"
    for what, unit in (("TTFT p50", "ms"), ("throughput", "tokens/s"), ("TPOT p50", "ms")):
        better = "higher" if what == "throughput" else "lower"
        pairs = [(real[what], model[what]) for real, model in rows]
        errors = [abs(model - real) / real for real, model in pairs]
        bar = None if what == "TPOT p50" else BAR
        found += [
            Figure.of(f"{head}: {what}, relative error", errors, "ratio", "lower", bar),
            Figure.of(f"{head}: {what}, real", [real for real, _ in pairs], unit, better),  # type: ignore[arg-type]
            Figure.of(f"{head}: {what}, simulated", [one for _, one in pairs], unit, better),  # type: ignore[arg-type]
        ]
    return found


def _show(console: Console, figures: Sequence[Figure]) -> None:
    table = Table(title="the model beside a real service")
    for name in ("", "median", "IQR", "bar"):
        table.add_column(name, justify="right" if name else "left")
    for one in figures:
        bar = "" if one.bar is None else f"{one.bar:g}" + ("" if one.ok else ", missed")
        style = None if one.ok else "red"
        name = one.metric.removeprefix("simulate, ")
        table.add_row(name, f"{one.value:.4g}", f"{one.spread_iqr:.2g}", bar, style=style)
    console.print(table)
