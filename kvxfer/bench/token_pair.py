"""The two engines of `kvxfer bench beside`, and what is measured of them, phase by phase."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from kvxfer.bench.token_phase import EngineContact, EngineSetup, Phase, Sample, differing
from kvxfer.bench.transfer_pair import ROLES, Pair, Process, initiator
from kvxfer.errors import TransferError
from kvxfer.transfer.lanes import Lane, candidates

if TYPE_CHECKING:
    from kvxfer.bench.beside import BesideOptions

START_TIMEOUT_S = 200.0
AHEAD_S = 0.1
"""How long before its beginning a phase is told of."""
WARM_UP_S = 1.0
PACED, SATURATED = "at a pace", "saturated"


def start_engine_process(
    ours: Connection, theirs: Connection, role: str, device: str, environment: Mapping[str, str]
) -> Process:
    from kvxfer.bench.token_end import serve_engine

    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve_engine, args=(theirs, role, device, environment))
    process.start()
    theirs.close()
    return process


class EnginePair(Pair):
    """A prefilling source and a decoding target."""

    start = staticmethod(start_engine_process)


@contextmanager
def engine_pair(devices: tuple[str, str], setup: EngineSetup) -> Iterator[tuple[EnginePair, Lane]]:
    """Started, connected, and with contents for what moves. Raises KvxferError."""
    pair = EnginePair(*devices)
    with pair:
        # What others take of a GPU meanwhile shows in what each measures: one after the other.
        in_turn = devices[0] == devices[1] != "cpu"
        for role in ROLES:
            pair.tell(role, setup)
            if in_turn:
                pair.hear(role, START_TIMEOUT_S)
        for role in () if in_turn else ROLES:
            pair.hear(role, START_TIMEOUT_S)
        yield pair, _connect(pair)


def _connect(pair: EnginePair) -> Lane:
    """The first lane that works."""
    contacts: dict[str, EngineContact] = pair.both("contact")
    reached = {
        role: pair.ask(role, "connect", contacts[other])
        for role, other in zip(ROLES, reversed(ROLES), strict=True)
    }
    lanes = candidates(contacts["source"].side, contacts["target"].side)
    usable = [lane for lane in lanes if lane.connector in reached[initiator(lane.direction)]]
    if not usable:
        raise TransferError(f"none of the lanes {', '.join(map(str, lanes))} works")
    pair.both("use", usable[0])
    pair.ask("source", "write")
    return usable[0]


@dataclass(slots=True)
class Ratios:
    """Of the phases of one kind to the quiet ones before them, round by round."""

    decode_p99: list[float] = field(default_factory=list)
    prefill_mean: list[float] = field(default_factory=list)
    gbps: list[float] = field(default_factory=list)

    def add(self, quiet: Mapping[str, Sample], loaded: Mapping[str, Sample]) -> None:
        self.decode_p99.append(loaded["target"].p99_ms / quiet["target"].p99_ms)
        self.prefill_mean.append(loaded["source"].mean_ms / quiet["source"].mean_ms)
        self.gbps.append(max(loaded[role].moved_gbps for role in ROLES))


@dataclass(slots=True)
class Beside:
    """What was found so far."""

    ratios: dict[str, Ratios] = field(
        default_factory=lambda: {PACED: Ratios(), SATURATED: Ratios()}
    )
    noise: Ratios = field(default_factory=Ratios)
    """A round's second quiet phase to its first."""
    quiet: list[Mapping[str, Sample]] = field(default_factory=list)
    wrong_sets: int = 0
    wrong_steps: int = 0
    """Of either's, that did not choose the tokens that the same steps chose before."""
    steps: dict[str, Sequence[Sequence[int]]] = field(
        default_factory=lambda: dict.fromkeys(ROLES, ())
    )
    """The longest run of each so far."""

    def compare(self, role: str, steps: Sequence[Sequence[int]]) -> None:
        self.wrong_steps += differing(steps, self.steps[role])
        self.steps[role] = max(self.steps[role], steps, key=len)


def measure(pair: EnginePair, options: BesideOptions, found: Beside) -> None:
    """All rounds, into `found` one by one. Raises KvxferError."""
    _phase(pair, options, None, WARM_UP_S, found)
    for index in range(options.rounds):
        before: Mapping[str, Sample] | None = None
        for name, gbps in ((PACED, options.gbps), (SATURATED, None)):
            quiet = _phase(pair, options, 0.0, options.seconds, found)
            loaded = _phase(pair, options, gbps, options.seconds, found)
            found.quiet.append(quiet)
            found.ratios[name].add(quiet, loaded)
            if before is not None:
                found.noise.add(before, quiet)
            before = quiet
            _tell(f"round {index + 1}, {name}", quiet, loaded)


def _phase(
    pair: EnginePair, options: BesideOptions, gbps: float | None, seconds: float, found: Beside
) -> dict[str, Sample]:
    """One phase of both; what moved and what was computed is compared into `found`."""
    if gbps != 0:
        pair.ask("target", "erase")
    phase = Phase(time.monotonic() + AHEAD_S, options.settle_s, seconds, gbps)
    samples: dict[str, Sample] = pair.both("measure", phase)
    pair.both("rest")
    if gbps != 0:
        found.wrong_sets += pair.ask("target", "wrong_sets")
    for role, sample in samples.items():
        found.compare(role, sample.outputs)
        if not sample.gaps_ms:
            reason = f"no two steps of the {role} ended within {seconds:g} s: measure for longer"
            raise TransferError(reason)
    return samples


def _tell(name: str, quiet: Mapping[str, Sample], loaded: Mapping[str, Sample]) -> None:
    moved = max(loaded[role].moved_gbps for role in ROLES)
    print(
        f"  {name}: {moved:.3g} GB/s; inter-token p99 {quiet['target'].p99_ms:.3f} → "
        f"{loaded['target'].p99_ms:.3f} ms, prefill {quiet['source'].mean_ms:.2f} → "
        f"{loaded['source'].mean_ms:.2f} ms",
        flush=True,
    )
