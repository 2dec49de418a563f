"""What engines that hand over came to, as figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.bench.report import Figure
from kvxfer.bench.vllm.client import Answer
from kvxfer.bench.vllm.handover import Moved


@dataclass(frozen=True, slots=True)
class Alone:
    """One engine's answer to a prompt, and again, when it finds the prompt in its prefix cache."""

    length: int
    cold: Answer
    cached: Answer


@dataclass(frozen=True, slots=True)
class HandedOver:
    """One prompt's way through two engines."""

    length: int
    prefill_s: float
    answer: Answer
    moved: Moved
    is_right: bool
    """Whether it is the answer of one engine alone."""
    whole_blocks: int
    """Of the prompt, as far as it is handed over: its last token is computed again."""
    equal_blocks: int
    """Of those, how many the consumer has as the producer has them."""


def alone_figures(found: Sequence[Alone]) -> list[Figure]:
    figures = []
    for length in sorted({one.length for one in found}):
        those = [one for one in found if one.length == length]
        name = f"vllm alone: {length} tokens"
        figures += [
            _ms(f"{name}, first token", [one.cold.first_token_s for one in those]),
            _ms(f"{name}, first token, cached", [one.cached.first_token_s for one in those]),
        ]
    return figures


def length_figures(connector: str, length: int, found: Sequence[HandedOver]) -> list[Figure]:
    """Of one length."""
    name = f"vllm {connector}: {length} tokens"
    figures = [
        _ms(f"{name}, at the producer", [one.prefill_s for one in found]),
        _ms(f"{name}, first token at the consumer", [one.answer.first_token_s for one in found]),
    ]
    if told := [one.moved for one in found if one.moved.transfers]:
        figures += [
            _ms(f"{name}, transfer", [one.move_s for one in told]),
            Figure.of(f"{name}, moved", [one.size_bytes for one in told], "bytes", "lower"),
            Figure.of(f"{name}, descriptors", [one.descriptors for one in told], "", "lower"),
        ]
    return figures


def summary_figures(
    connector: str, found: Sequence[HandedOver], held: int, first_s: float, is_ours: bool
) -> list[Figure]:
    """Of all hand-overs but the first, which took `first_s` to its first token; `held`: blocks of
    both engines at the end. Transfers that fail are a fault of `is_ours`, and told of others."""
    name = f"vllm {connector}"

    def none(metric: str, value: int, unit: str, bar: float | None = 0.0) -> Figure:
        return Figure(f"{name}: {metric}", value, unit, bar, "lower", 1, 0.0)

    bar = 0.0 if is_ours else None

    whole, equal = sum(f.whole_blocks for f in found), sum(f.equal_blocks for f in found)
    return [
        _ms(f"{name}: first hand-over, at the consumer", [first_s]),
        Figure(f"{name}: hand-overs", len(found), "requests", None, "higher", 1, 0.0),
        none("answers unlike one engine's", sum(not one.is_right for one in found), "requests"),
        Figure(f"{name}: blocks compared by digest", whole, "blocks", 1.0, "higher", 1, 0.0),
        none("blocks that differ by digest", whole - equal, "blocks"),
        none(
            "computed again, not moved", sum(not f.moved.transfers for f in found), "requests", bar
        ),
        none("failed transfers", sum(one.moved.failed for one in found), "transfers", bar),
        none("blocks held at the end", held, "blocks"),
    ]


def _ms(metric: str, samples_s: Sequence[float]) -> Figure:
    return Figure.of(metric, [1e3 * one for one in samples_s], "ms", "lower")
