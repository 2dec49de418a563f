"""The same prompts handed over and answered by a single process, in turn, and what came of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxfer.bench.token_cluster import Answer, TokenCluster, trace_path
from kvxfer.bench.token_model import check_lengths, random_prompts
from kvxfer.bench.token_timeline import moments_of, parts_of
from kvxfer.errors import KvxferError
from kvxfer.model.loader import ModelInfo
from kvxfer.telemetry.trace import read_trace

if TYPE_CHECKING:
    from kvxfer.bench.tokens import TokensOptions

SEED = 4096
TRACE_TIMEOUT_S = 5.0
"""A worker's events are in its file once it has sent what they tell of."""


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt's times to its first and its second token in ms."""

    single_ms: tuple[float, float]
    handed_ms: tuple[float, float]
    parts_ms: dict[str, float]
    """Of `handed_ms[1]`."""

    @property
    def added_ms(self) -> tuple[float, float]:
        return (
            self.handed_ms[0] - self.single_ms[0],
            self.handed_ms[1] - self.single_ms[1],
        )


@dataclass(slots=True)
class Equality:
    """Answers compared with the single process's."""

    prompts_with_other_kv: int = 0
    positions: int = 0
    """Tokens compared, up to the first that differs in an answer: those after it have another
    context."""
    flips: int = 0
    """Answers in which one differs."""
    kv_tokens: int = 0
    """Of prompts whose KV was compared."""

    def compare(self, ours: list[int], reference: list[int]) -> None:
        """Raises KvxferError where not as many tokens came."""
        if len(ours) != len(reference):
            raise KvxferError(f"{len(ours)} tokens came, of the single process {len(reference)}")
        for one, other in zip(ours, reference, strict=True):
            self.positions += 1
            if one != other:
                self.flips += 1
                return


@dataclass(slots=True)
class Found:
    """All that was measured."""

    rounds: list[Round] = field(default_factory=list)
    equality: Equality = field(default_factory=Equality)


def measure(cluster: TokenCluster, info: ModelInfo, options: TokensOptions, length: int) -> Found:
    """`length`: tokens of a prompt. Raises KvxferError."""
    new_tokens = max(2, options.verified_tokens)
    check_lengths(info, length, new_tokens)
    count = options.warm_up + options.requests + options.verified
    prompts = random_prompts(info, count, length, SEED)
    found = Found()
    for index in range(options.verified):
        _verify(cluster, prompts.pop(), f"verified-{index}", new_tokens, found.equality)
    for index, prompt in enumerate(prompts, start=-options.warm_up):
        one = _round(cluster, prompt, f"timed-{index}", found.equality)
        if index >= 0:
            found.rounds.append(one)
        first, second = one.added_ms
        print(
            f"  {'warm-up' if index < 0 else f'prompt {index + 1}'}: first token "
            f"{one.handed_ms[0]:.2f} ms ({first:+.2f}), second {one.handed_ms[1]:.2f} ms "
            f"({second:+.2f})",
            flush=True,
        )
    return found


def _verify(
    cluster: TokenCluster, prompt: list[int], name: str, new_tokens: int, equality: Equality
) -> None:
    single = cluster.ask(cluster.single, prompt, new_tokens, f"{name}-single", verify=True)
    handed = cluster.ask(cluster.decode, prompt, new_tokens, name, verify=True)
    equality.kv_tokens += len(prompt)
    is_equal = bool(handed.kv_digests) and handed.kv_digests == single.kv_digests
    equality.prompts_with_other_kv += not is_equal
    equality.compare(handed.tokens, single.tokens)


def _round(cluster: TokenCluster, prompt: list[int], name: str, equality: Equality) -> Round:
    first = cluster.ask(cluster.single, prompt, 1, f"{name}-first")
    second = cluster.ask(cluster.single, prompt, 2, f"{name}-second")
    handed = cluster.ask(cluster.decode, prompt, 2, name)
    equality.compare(first.tokens, second.tokens[:1])
    equality.compare(handed.tokens, second.tokens)
    return Round(
        single_ms=(1e3 * first.seconds_to(0), 1e3 * second.seconds_to(1)),
        handed_ms=(1e3 * handed.seconds_to(0), 1e3 * handed.seconds_to(1)),
        parts_ms=_parts(cluster, handed),
    )


def _parts(cluster: TokenCluster, handed: Answer) -> dict[str, float]:
    """From the traces, which hold the end of the hand-over before its first token is sent."""
    deadline_s = time.monotonic() + TRACE_TIMEOUT_S
    while True:
        events = [
            event
            for role in ("prefill", "decode")
            for event in read_trace(trace_path(cluster.run_dir, role))
        ]
        moments = moments_of(handed.request_id, handed.sent_ns, handed.seen_ns, events)
        if {"accepted", "requested", "computed", "last_read", "filled"} <= moments.keys():
            return parts_of(moments)
        if time.monotonic() > deadline_s:
            raise KvxferError(f"{handed.request_id}: its traces hold no more than {list(moments)}")
        time.sleep(0.01)
