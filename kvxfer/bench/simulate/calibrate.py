"""`kvxfer bench simulate calibrate`: costs of this machine, from loads on one real service.

| load       | is                                                  | for                           |
| ---        | ---                                                 | ---                           |
| alone      | requests one by one, of several lengths             | all that one waits for        |
| burst of N | N requests at once, which then decode together      | decode's steps; CPU of router |
|            |                                                     | and client                    |
| crowded    | requests at random, prefill and decode busy at once | crowding, by the model itself |
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from kvxfer.bench.report import describe_machine, measured_commit
from kvxfer.bench.serving.options import ServingOptions
from kvxfer.bench.serving.prompts import Prompt, Shape, make_round
from kvxfer.bench.serving.screen import Screen
from kvxfer.bench.simulate import fit
from kvxfer.bench.simulate.costs import Costs, write_costs
from kvxfer.bench.simulate.options import CalibrateOptions, need_simpy
from kvxfer.bench.simulate.placing import measure_placing
from kvxfer.bench.simulate.real import Observed, RealService, real_service
from kvxfer.bench.simulate.report import Outcome
from kvxfer.bench.simulate.run import simulate_once
from kvxfer.bench.simulate.shape import ClusterShape
from kvxfer.config import WorkerOptions
from kvxfer.errors import KvxferError

BUNDLED = Path(__file__).parents[2] / "model" / "tiny"
ALONE_TOKENS = (64, 256, 400, 512, 1024, 1500)
ALONE_TIMES = 4
ALONE_OUTPUT = 20
BURSTS = ((2, 64, 80), (4, 64, 80), (8, 64, 80), (8, 512, 80), (16, 64, 80))
"""Sequences, tokens of each prompt and of each answer."""
CROWDED = {"request_rate": 5.0, "num_prompts": 60, "random_input_len": 300, "random_output_len": 40}
CROWDINGS = [at / 50 for at in range(41)]
"""That are tried."""
VOCABULARY = 256
SEED = 7
"""Of the prompts: `validate` has others."""


def run_calibrate(options: CalibrateOptions) -> int:
    """Measure, fit, print, write. Raises KvxferError."""
    options.check()
    need_simpy()
    from kvxfer.bench.simulate.screen import show_costs

    costs = calibrate(options, Screen())
    show_costs(Console(highlight=False), costs)
    return 0


def calibrate(options: CalibrateOptions, screen: Screen) -> Costs:
    """And write them to `options.out`."""
    with real_service(model_of(options), 1, 1, options.log_dir, screen.say) as service:
        alone, *bursts = [
            _observe(service, screen, *one) for one in [_alone(), *map(_burst, BURSTS)]
        ]
        crowded = _observe(service, screen, "crowded", crowd(), 0)
    screen.say("timing the router's choice of a pair")
    costs = fitted(alone, bursts, measure_placing())
    costs = replace(costs, crowding=fit_crowding(costs, crowded))
    write_costs(options.out, costs)
    return costs


def model_of(options: CalibrateOptions) -> Path:
    return options.model or BUNDLED


def fitted(alone: Observed, bursts: Sequence[Observed], placing: dict[str, float]) -> Costs:
    """All but the crowding."""
    chunk = WorkerOptions(model=Path()).max_num_batched_tokens
    values = fit.fit_prefill(alone, chunk) | fit.fit_processes([alone, *bursts])
    values |= fit.fit_ways(alone, values)
    values |= fit.fit_lane(alone, chunk, values["prefill_control_s"] / 2)
    values |= fit.fit_decode(alone, bursts)
    where = f"{describe_machine('cpu')}, commit {measured_commit()}"
    source = f"fitted to loads on a real service of one prefill and one decode worker: {where}"
    sources = dict.fromkeys([*values, "crowding"], source)
    sources |= dict.fromkeys(placing, f"timed: kvxfer.serve.pairing on {where}")
    what = f"kvxfer serve with a thread a worker, on {describe_machine('cpu')}"
    return Costs(**values, **placing, sources=sources, what=what)


def fit_crowding(costs: Costs, crowded: Observed) -> float:
    """With which the model comes nearest to the times of a load that keeps both workers busy."""
    wanted = medians_ms(crowded)
    load, shape = shapes_of(crowded), real_shape(1, 1, costs)

    def error(crowding: float) -> float:
        found = simulate_once(shape, replace(costs, crowding=crowding), load, SEED, {})
        told = simulated_ms(found)
        return sum(math.log(told[name] / wanted[name]) ** 2 for name in wanted)

    return min(CROWDINGS, key=error)


def real_shape(prefill: int, decode: int, costs: Costs) -> ClusterShape:
    """Of the service that `real_service` starts, with all of it on this machine's cores."""
    worker = WorkerOptions(model=Path())
    blocks = int(134217728 // (costs.kv_token_bytes * worker.block_size))
    return ClusterShape(
        prefill=prefill,
        decode=decode,
        cores=len(os.sched_getaffinity(0)),
        chunk_tokens=worker.max_num_batched_tokens,
        max_num_seqs=worker.max_num_seqs,
        max_num_queued=worker.max_num_queued_seqs,
        block_size=worker.block_size,
        prefill_blocks=blocks,
        decode_blocks=blocks,
    )


def shapes_of(load: Observed) -> list[Shape]:
    return [Shape(one.at_s, len(one.tokens), one.num_output) for one in load.prompts]


def medians_ms(load: Observed) -> dict[str, float]:
    return {
        "ttft": float(np.median([one.ttft_ms for one in load.answers])),
        "tpot": float(np.median([one.tpot_ms or 0.0 for one in load.answers])),
    }


def simulated_ms(found: Outcome) -> dict[str, float]:
    """Of the same names."""
    return {name: found.summary[name, "median"] for name in ("ttft", "tpot")}


def crowd() -> list[Prompt]:
    options = ServingOptions(base_url="http://x", seed=SEED, random_range_ratio=0.5, **CROWDED)  # type: ignore[arg-type]
    return make_round(options, [], VOCABULARY, 0)


def _alone() -> tuple[str, list[Prompt], int]:
    chance = np.random.default_rng(SEED)
    sizes = [size for _ in range(ALONE_TIMES) for size in ALONE_TOKENS]
    tokens = [chance.integers(0, VOCABULARY, size).tolist() for size in sizes]
    return "alone", [Prompt(0.0, one, ALONE_OUTPUT) for one in tokens], 1


def _burst(load: tuple[int, int, int]) -> tuple[str, list[Prompt], int]:
    count, size, num_output = load
    chance = np.random.default_rng([SEED, count, size])
    tokens = [chance.integers(0, VOCABULARY, size).tolist() for _ in range(count)]
    return f"burst of {count}", [Prompt(0.0, one, num_output) for one in tokens], 0


def _observe(
    service: RealService, screen: Screen, name: str, prompts: list[Prompt], most: int
) -> Observed:
    with screen.bar(name, len(prompts)) as step:
        found = service.load(name, prompts, most, step)
    if not all(one.num_output > 1 for one in found.answers):
        raise KvxferError(f"{name}: answers of one token tell nothing of decode")
    return found
