"""`kvxfer bench identity`: a cache that grows, sleeps or was told its size changes no byte.

The same prompts, with the same model and chunks, over caches of every kind: tokens and the digests
of the prompts' KV are compared with those over a fixed cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cyclopts import Parameter

from kvxfer.bench.record import Record, command_line
from kvxfer.bench.report import Figure, describe_machine
from kvxfer.cache.footprint import blocks_needed
from kvxfer.cache.table import BlockTable
from kvxfer.config import WorkerOptions, resolve
from kvxfer.control.router_messages import Generate, Sampling
from kvxfer.errors import UsageError
from kvxfer.model.tiny import MODEL_DIR

SIZE_BYTES = 256 << 20
CHUNK_TOKENS = 128
PROMPT_CHARACTERS = (200, 900, 1500)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityOptions:
    """What `kvxfer bench identity` may be told."""

    model: Path = MODEL_DIR
    """Hugging Face directory of a model (default: the bundled one)."""
    device: str = "auto"
    """cpu, cuda, cuda:N or auto."""
    layout: str = "LBHNC"
    """Cache layout, or one by kind of group."""
    max_new_tokens: int = 48
    """Tokens generated for each prompt."""
    json: Path | None = None
    """Write the figures to this file."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A cache, and what is done to it between two rounds of the prompts."""

    name: str
    changes: dict[str, Any]
    between: Callable[[Any], object] | None = None


Answers = list[tuple[list[int], list[str]]]
"""Tokens and KV digests of each prompt."""


def _grow(engine: Any) -> None:
    committed = engine.cache.committed_blocks
    engine.cache.extend([blocks + 64 for blocks in committed])


def _doze(engine: Any) -> None:
    engine.cache.sleep()
    engine.cache.wake()


def _pack(engine: Any) -> None:
    _grow(engine)
    engine.cache.defragment()


def _elastic(initial_blocks: int) -> dict[str, Any]:
    return {"kv_commit": "elastic", "kv_initial_blocks": initial_blocks}


VARIANTS = (
    Variant("growable, all committed", {}),
    Variant("growable, grown in between", _elastic(200), _grow),
    Variant("growable, slept in between", _elastic(400), _doze),
    Variant("growable, packed in between", _elastic(200), _pack),
    Variant("growable, of a given size", {"kv_cache_memory_bytes": SIZE_BYTES}),
    Variant(
        "fixed, of a given size",
        {"kv_cache_memory_bytes": SIZE_BYTES, "enable_extensible_kv_cache": False},
    ),
)
"""Compared with a fixed cache that was sized by an estimate."""


def run_identity(options: IdentityOptions) -> int:
    """Compare, print, write; 1 when anything differs. Raises KvxferError."""
    from kvxfer.worker.device import resolve_device

    if options.max_new_tokens < 1:
        raise UsageError("max_new_tokens", options.max_new_tokens, "must be at least 1")
    device = resolve_device(options.device)
    budget = 6 << 30 if device != "cpu" else 2 << 30
    base = resolve(
        WorkerOptions(
            model=options.model,
            device=device,
            connector="none",
            kv_cache_layout=options.layout,
            memory_budget_bytes=budget,
            max_num_batched_tokens=CHUNK_TOKENS,
            max_num_seqs=4,
            kv_cache_memory_bytes=0,
        ),
        "single",
    )
    record = Record(options.json, command_line("identity", options))
    record.machine = describe_machine(device)
    fixed = replace(base, enable_extensible_kv_cache=False)
    expected = _answers(fixed, Variant("fixed", {}), options.max_new_tokens)[0]
    for variant in VARIANTS:
        rounds = _answers(replace(base, **variant.changes), variant, options.max_new_tokens)
        equal = all(answers == expected for answers in rounds)
        name = f"same tokens and KV as a fixed cache: {variant.name}"
        record.add(Figure(name, float(equal), "1 = yes", 1.0, "higher", len(rounds), 0.0))
    return record.exit_code


def _answers(options: WorkerOptions, variant: Variant, max_new_tokens: int) -> list[Answers]:
    """One round of answers, or two with something done in between."""
    from kvxfer.bench.scratch import NoConnector
    from kvxfer.worker.engine import start_engine

    engine = start_engine(options, {"none": NoConnector}, "identity", _say)
    try:
        engine.cache.extend(engine.initial_blocks)
        rounds = [_round(engine, options, max_new_tokens)]
        if variant.between is not None:
            variant.between(engine)
            rounds.append(_round(engine, options, max_new_tokens))
        return rounds
    finally:
        engine.connector.close()
        engine.close()


def _round(engine: Any, options: WorkerOptions, max_new_tokens: int) -> Answers:
    """Each prompt in blocks from the end of what is committed."""
    from kvxfer.model.tokenizer import Tokenizer
    from kvxfer.worker.single import generate

    text = (MODEL_DIR / "excerpt.txt").read_text()
    tokenizer = Tokenizer.load(options.model)
    answers = []
    for length in PROMPT_CHARACTERS:
        tokens = tokenizer.encode(text[:length])
        needed = blocks_needed(engine.specs, len(tokens), max_new_tokens, CHUNK_TOKENS)
        tables = [
            BlockTable(range(end - count, end))
            for count, end in zip(needed, engine.cache.committed_blocks, strict=True)
        ]
        request = Generate("r", tokens, max_new_tokens, Sampling(), [], "", True)
        found = generate(engine.runner, engine.cache, request, tables, CHUNK_TOKENS)
        answers.append((found.tokens, found.kv_digests))
    return answers


def _say(text: str) -> None:
    print(f"  {text}", flush=True)
