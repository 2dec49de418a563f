"""One kind, measured: transfers in turn with the machine's own copy, each checked byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvxfer.bench.connectors.ceilings import Ceilings
from kvxfer.bench.connectors.moves import Aim, Timed
from kvxfer.bench.connectors.pair import ConnectorsPair
from kvxfer.bench.connectors.report import Row
from kvxfer.bench.connectors.summary import latency_of, median_us, spread_of
from kvxfer.bench.connectors.sweep import Trial
from kvxfer.bench.transfer_shapes import random_places
from kvxfer.errors import TransferError

SEED = 20


@dataclass(slots=True)
class Samples:
    """What was found of one trial so far, run by run."""

    runs: list[Timed] = field(default_factory=list)
    ceilings: list[float] = field(default_factory=list)
    """GB/s just before each run."""
    verified_bytes: int = 0

    def row(self, trial: Trial, ceiling: str, problem: str = "") -> Row:
        seconds = [run.post_s + run.transfer_s for run in self.runs]
        gbps = [run.total_bytes / s / 1e9 for run, s in zip(self.runs, seconds, strict=True)]
        shares = [one / other for one, other in zip(gbps, self.ceilings, strict=True)]
        last = self.runs[-1] if self.runs else None
        return Row(
            kind=trial.kind,
            gb_per_s=spread_of(gbps),
            latency_us=latency_of(seconds),
            prepare_us=median_us([run.prepare_s for run in self.runs]),
            post_us=median_us([run.post_s for run in self.runs]),
            transfer_us=median_us([run.transfer_s for run in self.runs]),
            descriptors=last.descriptors if last else 0,
            bytes_per_descriptor=last.total_bytes / max(1, last.descriptors) if last else 0.0,
            ceiling=ceiling if self.runs else "",
            share=spread_of(shares),
            verified_bytes=self.verified_bytes,
            runs=len(self.runs),
            problem=problem,
        )


@dataclass(frozen=True, slots=True)
class Rounds:
    """How often, and how."""

    warm_up: int
    runs: int
    verify: bool


def measure(
    pair: ConnectorsPair,
    trial: Trial,
    rounds: Rounds,
    ceilings: Ceilings,
    samples: Samples,
    on_run: Callable[[], None],
) -> None:
    """Fill `samples` as far as it comes. Raises KvxferError; TransferError for a wrong byte."""
    pair.aim(aim_of(trial))
    ceilings.measure_socket(pair, trial)
    name = ceilings.name_of(trial)
    for index in range(-rounds.warm_up, rounds.runs):
        if rounds.verify:
            pair.ask("target", "wipe")
        ceiling = ceilings.take(pair, trial)
        timed = pair.move(trial.direction)
        if timed.total_bytes != trial.size_bytes:
            raise TransferError(f"{timed.total_bytes} bytes moved, not {trial.size_bytes}")
        if rounds.verify and not pair.ask("target", "verify"):
            raise TransferError("what arrived differs from the source's blocks")
        if index >= 0:
            ceilings.keep(name, ceiling)
            samples.runs.append(timed)
            samples.ceilings.append(ceiling)
            samples.verified_bytes += timed.total_bytes if rounds.verify else 0
        on_run()


def aim_of(trial: Trial) -> Aim:
    """Random places, the same in every run of the same settings: connectors have the same to do."""
    places = range(1, trial.setting.capacity)
    source, target = (random_places(trial.kind.batch, places, SEED + side) for side in range(2))
    return Aim(trial.direction, source, target, trial.setting.shapes.num_heads, SEED)
