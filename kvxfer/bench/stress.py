"""`kvxfer bench stress`: what an estimate does not know of, and a measurement does.

One load (speculative decoding with a drafting model, its graphs, logits and sampling workspaces)
on a cache that was sized by an estimate and does not grow, and on one that was sized by measuring
that load in warm-up and then extended. Each in a process of its own.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from cyclopts import Parameter

from kvxfer.bench.isolated import run_isolated
from kvxfer.bench.journal import Journal
from kvxfer.bench.record import Record, command_line
from kvxfer.bench.report import Figure, describe_machine
from kvxfer.bench.service_options import ServiceOptions
from kvxfer.cache.sizing import FIXED_UTILIZATION
from kvxfer.errors import UsageError

if TYPE_CHECKING:
    from kvxfer.bench.service_engine import ServiceSetup

PATH_TIMEOUT_S = 300.0


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class StressOptions(ServiceOptions):
    """What `kvxfer bench stress` may be told."""

    sequences: int = 512
    """Sequences served at once: the largest batch of a decode step."""
    draft_tokens: int = 7
    """Tokens drafted, and verified in one pass, for each sequence and step."""
    utilization: float = FIXED_UTILIZATION
    """Share of the device that the fixed path is tried with first."""
    utilization_step: float = 0.04
    """How far it is lowered each time that it runs out of memory."""
    lowest_utilization: float = 0.5
    """Below this the fixed path is given up."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one path ended; plain values, since it crosses a process."""

    survives: bool
    kv_tokens: int
    detail: str
    """Why it did not, or what it generated."""
    digest: str
    """Of every token of every sequence, '' if it does not survive."""
    machine: str


def run_stress(options: StressOptions) -> int:
    """Measure, print, write; 1 when a bar was missed. Raises KvxferError."""
    from kvxfer.bench.service_engine import service_setup

    if not 0 < options.lowest_utilization <= options.utilization <= 1:
        raise UsageError("utilization", options.utilization, "must be in (0, 1]")
    if options.utilization_step <= 0:
        raise UsageError("utilization_step", options.utilization_step, "must be more than 0")
    command = command_line("stress", options)
    record, journal = Record(options.json, command), Journal(options.json, command)
    with service_setup(options) as setup:
        stress = _Stress(options, setup, record, journal)
        growable = stress.growable()
        fixed = stress.fixed()
    if fixed is not None and fixed.kv_tokens:
        ratio = growable.kv_tokens / fixed.kv_tokens
        record.add(Figure("stress_tokens_ratio", ratio, "×", None, "higher", 1, 0.0))
        same = float(growable.digest == fixed.digest)
        record.add(Figure("stress_outputs_equal", same, "0/1", 1.0, "higher", 1, 0.0))
    journal.close()
    return record.exit_code


class _Stress:
    def __init__(
        self,
        options: StressOptions,
        setup: ServiceSetup,
        record: Record,
        journal: Journal,
    ) -> None:
        self._options = options
        self._setup = setup
        self._record = record
        self._journal = journal

    def growable(self) -> Outcome:
        outcome = self._try("growable", None)
        self._add("stress_growable_survives", float(outcome.survives), "0/1", bar=1.0)
        self._add("stress_growable_kv_tokens", outcome.kv_tokens, "tokens")
        return outcome

    def fixed(self) -> Outcome | None:
        """The first utilisation that survives, from the usual one down; None: none does."""
        options = self._options
        utilization = options.utilization
        while utilization >= options.lowest_utilization:
            outcome = self._try(f"fixed at {utilization:.2f}", utilization)
            if utilization == options.utilization:
                name = f"stress_fixed_{100 * utilization:03.0f}_survives"
                self._add(name, float(outcome.survives), "0/1")
            if outcome.survives:
                self._add("stress_fixed_lowered_utilization", utilization, "of the device")
                self._add("stress_fixed_kv_tokens", outcome.kv_tokens, "tokens")
                return outcome
            utilization = round(utilization - options.utilization_step, 4)
        return None

    def _try(self, name: str, utilization: float | None) -> Outcome:
        """One path in a fresh process, unless an earlier run of this command has its outcome."""
        kept = self._journal.get(name)
        if kept is None:
            print(f"{name}:", flush=True)
            told = (self._setup, utilization)
            outcome = run_isolated(serve_once, *told, timeout_s=PATH_TIMEOUT_S)
            self._journal.keep(name, asdict(outcome))
        else:
            outcome = Outcome(**kept)
        self._record.machine = outcome.machine
        verdict = "serves" if outcome.survives else "does not survive"
        print(f"{name}: {verdict}, {outcome.kv_tokens} KV tokens: {outcome.detail}", flush=True)
        return outcome

    def _add(self, metric: str, value: float, unit: str, bar: float | None = None) -> None:
        self._record.add(Figure(metric, value, unit, bar, "higher", 1, 0.0))


def serve_once(setup: ServiceSetup, utilization: float | None) -> Outcome:
    """One path in this process: start, then the load. `utilization` None: the growable one.

    Other errors than a lack of memory are raised.
    """
    from kvxfer.bench.scratch import is_out_of_memory
    from kvxfer.bench.service_engine import start_fixed, start_growable
    from kvxfer.bench.service_load import digest_of

    kv_tokens, machine = 0, describe_machine(setup.device)
    try:
        with ExitStack() as undo:
            if utilization is None:
                serving = start_growable(setup, undo)
            else:
                serving = start_fixed(setup, utilization, undo)
            kv_tokens = serving.kv_tokens
            tokens = serving.service.run()
            accepted = serving.service.accepted
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        detail = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return Outcome(False, kv_tokens, detail, "", machine)
    new = sum(map(len, tokens)) - len(tokens) * setup.shape.prompt_tokens
    detail = f"{new} tokens generated, {accepted} drafts accepted"
    return Outcome(True, kv_tokens, detail, digest_of(tokens), machine)
