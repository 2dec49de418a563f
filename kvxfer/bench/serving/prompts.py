"""What is asked for: prompts of random tokens, of random lengths or a trace's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from kvxfer.bench.serving.load import arrivals
from kvxfer.bench.serving.options import ServingOptions
from kvxfer.errors import UsageError

HASHED_TOKENS = 512
"""That each of a trace's hash_ids stands for (Mooncake's published traces)."""
LONGEST = 1 << 24
"""Tokens: more is no length."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of a round."""

    at_s: float
    """When it is due, from the round's start."""
    tokens: list[int]
    num_output: int
    """Tokens of the answer."""


class TraceLine(msgspec.Struct, frozen=True):
    """One request of a trace; other fields are left alone."""

    timestamp: float
    """In ms; where it begins does not matter."""
    input_length: int
    output_length: int
    hash_ids: list[int] = []
    """Of every 512 tokens of the prompt: equal ids are equal tokens."""


def make_round(
    options: ServingOptions, trace: Sequence[TraceLine], vocab_size: int, index: int
) -> list[Prompt]:
    """The requests of round `index`: a function of the options and the seed. A `trace` gives all
    rounds the same times and lengths, and prompts of their own."""
    chance = np.random.default_rng([options.seed, index])
    if trace:
        return _of_trace(options, trace, vocab_size, index, chance)
    count = options.num_prompts
    times = arrivals(count, options.request_rate, options.burstiness, chance)
    prefix = chance.integers(0, vocab_size, options.random_prefix_len).tolist()
    inputs = _lengths(options.random_input_len, options.random_range_ratio, count, chance)
    outputs = _lengths(options.random_output_len, options.random_range_ratio, count, chance)
    return [
        Prompt(at_s, prefix + chance.integers(0, vocab_size, size).tolist(), num_output)
        for at_s, size, num_output in zip(times, inputs, outputs, strict=True)
    ]


def _lengths(length: int, ratio: float, count: int, chance: np.random.Generator) -> list[int]:
    """Uniform in [length * (1 - ratio), length * (1 + ratio)], both ends among them."""
    low, high = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    return [int(one) for one in chance.integers(low, high, count, endpoint=True)]


def _of_trace(
    options: ServingOptions,
    trace: Sequence[TraceLine],
    vocab_size: int,
    index: int,
    chance: np.random.Generator,
) -> list[Prompt]:
    scale, per_hash = options.trace_scale, max(1, round(HASHED_TOKENS * options.trace_scale))
    first = trace[0].timestamp
    found = []
    for line in trace[: options.num_prompts]:
        at_s = (line.timestamp - first) / 1e3 / options.trace_speed
        size = max(1, round(line.input_length * scale))
        tokens: list[int] = []
        for hashed in line.hash_ids:
            own = np.random.default_rng([options.seed, index, hashed])
            tokens += own.integers(0, vocab_size, per_hash).tolist()
        missing = size - len(tokens)
        if missing > 0:
            tokens += chance.integers(0, vocab_size, missing).tolist()
        found.append(Prompt(at_s, tokens[:size], max(1, round(line.output_length * scale))))
    return found


def read_trace(path: Path) -> list[TraceLine]:
    """Raises UsageError, which names the line, for what is no trace."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError("trace", str(path), error.strerror or str(error)) from None
    lines = text.splitlines()
    if not lines:
        raise UsageError("trace", str(path), "is empty")
    found: list[TraceLine] = []
    for number, raw in enumerate(lines, 1):
        try:
            line = msgspec.json.decode(raw, type=TraceLine)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            reason = str(error) if raw.strip() else "is empty"
            raise UsageError("trace", f"{path}:{number}", reason) from None
        _check_line(line, found[-1] if found else None, f"{path}:{number}")
        found.append(line)
    return found


def _check_line(line: TraceLine, before: TraceLine | None, where: str) -> None:
    for name in ("input_length", "output_length"):
        value = getattr(line, name)
        if not 1 <= value <= LONGEST:
            raise UsageError("trace", where, f"{name} is {value}")
    if not 0 <= line.timestamp < math.inf:
        raise UsageError("trace", where, f"timestamp is {line.timestamp}")
    if before is not None and line.timestamp < before.timestamp:
        raise UsageError("trace", where, f"timestamp {line.timestamp:g} is before the line above")
    if any(one < 0 for one in line.hash_ids):
        raise UsageError("trace", where, f"hash_ids has {min(line.hash_ids)}")
