"""`kvxfer bench soak`: many hand-overs between two workers that grow, shrink and sleep meanwhile.

Real connectors move the KV of `null_engine`'s pattern, so every answer is known and a wrong byte
shows as a wrong token. What a process holds is looked at while both workers sleep, when no KV is
among it. One pair of workers for each choice of connectors, one after the other.
"""

from __future__ import annotations

import random
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvxfer.bench.null_tokens import VOCAB_SIZE, answer
from kvxfer.bench.record import Record, command_line
from kvxfer.bench.report import Figure, describe_machine
from kvxfer.bench.soak_cluster import Held, SoakCluster
from kvxfer.bench.soak_figures import figures_of
from kvxfer.errors import DeadlineExceeded, KvxferError, UsageError
from kvxfer.serve.completion import Completion

OUTSTANDING = 12
ANSWER_TIMEOUT_S = 60.0
CHANGE_EVERY = 50
"""Hand-overs between two shrinks of one cache or the other."""
SLEEP_EVERY = 4
"""Of those, between two sleeps of both."""
LONGEST_PROMPTS, LONGEST_ANSWER = (30, 90, 240), 3
"""Between two changes prompts are as long as one of these at the most: caches that were shrunk
after short ones have to grow for long ones."""
WARM, MOST_WARM = 0.2, 2000
"""Of all hand-overs, and how many at the most, after which what is held must not grow any more."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """What `kvxfer bench soak` may be told."""

    hand_overs: int = 2000
    """How many in all, for each choice of connectors."""
    connector: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (
        "nixl",
        "peer",
        "peer,nixl",
    )
    """What moves the KV: choices, one after the other; several with commas are all used at once."""
    lane: str = "auto"
    """push, pull or auto."""
    seed: int = 0
    """Of prompts and changes."""
    json: Path | None = None
    """Write the figures to this file."""

    @property
    def num_warm(self) -> int:
        """Hand-overs before what is held is looked at."""
        return min(MOST_WARM, int(WARM * self.hand_overs))


@dataclass
class Soak:
    """What was found so far."""

    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    done: int = 0
    shrinks: int = 0
    """Those that gave memory back."""
    sleeps: int = 0
    held: list[Held] = field(default_factory=list)
    """Sample by sample; the first after the warm part."""
    problems: list[str] = field(default_factory=list)
    growths: dict[str, int] = field(default_factory=dict)
    """By worker."""
    took_s: float = 0.0


def run_soak(options: SoakOptions) -> int:
    """Run, print, write; 1 when anything was wrong, lost or leaked. Raises KvxferError."""
    if options.hand_overs < 10:
        raise UsageError("hand_overs", options.hand_overs, "must be at least 10")
    if not options.connector:
        raise UsageError("connector", "", "name at least one")
    record = Record(options.json, command_line("soak", options))
    record.machine = describe_machine("cpu")
    for connector in options.connector:
        name = f"soak {connector}"
        try:
            found = _soak(options, connector)
        except KvxferError:
            record.add(Figure(f"{name}: broke off", 1, "runs", 0.0, "lower", 1, 0.0))
            raise
        for problem in (*found.problems, *found.failed[:5]):
            print(f"{name}: {problem}", flush=True)
        record.add(*figures_of(name, options.hand_overs, found))
    return record.exit_code


def _soak(options: SoakOptions, connector: str) -> Soak:
    found = Soak()
    with ExitStack() as undo:
        directory = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-soak-")))
        cluster = SoakCluster.start(directory, connector, options.lane, undo)
        before = cluster.generations()
        start_s = time.monotonic()
        _run(cluster, options, found)
        found.took_s = time.monotonic() - start_s
        found.problems += cluster.why_not_conserved()
        for worker, generation in cluster.generations().items():
            found.growths[worker] = (
                generation - before[worker] - found.sleeps
            )  # each wake-up is one
    return found


def _run(cluster: SoakCluster, options: SoakOptions, found: Soak) -> None:
    chance = random.Random(options.seed)
    under_way: list[tuple[Completion, int]] = []
    sent, next_change, next_shrink = 0, CHANGE_EVERY, CHANGE_EVERY // 2
    longest = LONGEST_PROMPTS[0]
    while found.done < options.hand_overs:
        while len(under_way) < OUTSTANDING and sent < min(options.hand_overs, next_change):
            length = chance.randint(1, longest)
            prompt = [chance.randrange(VOCAB_SIZE) for _ in range(length)]
            num_new = chance.randint(1, LONGEST_ANSWER)
            under_way.append((cluster.submit(prompt, num_new), num_new))
            sent += 1
        _collect(cluster, under_way, found)
        if found.done >= next_shrink:
            next_shrink += CHANGE_EVERY
            found.shrinks += cluster.shrink(chance)  # while hand-overs are under way
        if not under_way and found.done >= next_change:
            next_change += CHANGE_EVERY
            longest = chance.choice(LONGEST_PROMPTS)
            if next_change // CHANGE_EVERY % SLEEP_EVERY == 0:
                _sleep(cluster, found, found.done >= options.num_warm)
    for _ in range(3):  # that there are a begin, a middle and an end, however few hand-overs
        _sleep(cluster, found, True)


def _sleep(cluster: SoakCluster, found: Soak, is_warm: bool) -> None:
    held = cluster.sleep_and_look(found.held[0] if found.held else None)
    found.sleeps += 1
    if is_warm:
        found.held.append(held)


def _collect(cluster: SoakCluster, under_way: list[tuple[Completion, int]], found: Soak) -> None:
    """Take in what is finished. Raises DeadlineExceeded."""
    cluster.poll()
    now_s = time.monotonic()
    for one in list(under_way):
        completion, num_new = one
        finished = completion.finished
        if finished is None:
            if now_s - completion.sent_s > ANSWER_TIMEOUT_S:
                raise DeadlineExceeded(f"no answer within {ANSWER_TIMEOUT_S:g} s")
            continue
        under_way.remove(one)
        found.done += 1
        if finished.error:
            found.failed.append(finished.error)
        elif completion.output != answer(completion.tokens, num_new):
            found.wrong += 1
