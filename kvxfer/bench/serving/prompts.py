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
    shapes, prefix = _random_shapes(options, vocab_size, chance)
    own = [one.num_input - len(prefix) for one in shapes]
    return [
        Prompt(one.at_s, prefix + chance.integers(0, vocab_size, size).tolist(), one.num_output)
        for one, size in zip(shapes, own, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Shape:
    """A request without its tokens."""

    at_s: float
    num_input: int
    num_output: int


def make_shapes(
    options: ServingOptions, trace: Sequence[TraceLine], vocab_size: int, index: int
) -> list[Shape]:
    """Those of the requests that `make_round` makes of the same arguments."""
    if trace:
        lines, scale = trace[: options.num_prompts], options.trace_scale
        return [Shape(_due_s(options, trace, line), *_scaled(line, scale)) for line in lines]
    chance = np.random.default_rng([options.seed, index])
    return _random_shapes(options, vocab_size, chance)[0]


def _random_shapes(
    options: ServingOptions, vocab_size: int, chance: np.random.Generator
) -> tuple[list[Shape], list[int]]:
    """And the tokens that all of them begin with."""
    count = options.num_prompts
    times = arrivals(count, options.request_rate, options.burstiness, chance)
    prefix: list[int] = chance.integers(0, vocab_size, options.random_prefix_len).tolist()
    inputs = _lengths(options.random_input_len, options.random_range_ratio, count, chance)
    outputs = _lengths(options.random_output_len, options.random_range_ratio, count, chance)
    rows = zip(times, inputs, outputs, strict=True)
    return [Shape(at_s, len(prefix) + size, out) for at_s, size, out in rows], prefix


def _due_s(options: ServingOptions, trace: Sequence[TraceLine], line: TraceLine) -> float:
    return (line.timestamp - trace[0].timestamp) / 1e3 / options.trace_speed


def _scaled(line: TraceLine, scale: float) -> tuple[int, int]:
    """Tokens of its prompt and of its answer."""
    return max(1, round(line.input_length * scale)), max(1, round(line.output_length * scale))


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
    found = []
    for line in trace[: options.num_prompts]:
        size, num_output = _scaled(line, scale)
        tokens: list[int] = []
        for hashed in line.hash_ids:
            own = np.random.default_rng([options.seed, index, hashed])
            tokens += own.integers(0, vocab_size, per_hash).tolist()
        missing = size - len(tokens)
        if missing > 0:
            tokens += chance.integers(0, vocab_size, missing).tolist()
        found.append(Prompt(_due_s(options, trace, line), tokens[:size], num_output))
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
