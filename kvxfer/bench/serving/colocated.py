"""One process that prefills and decodes, with continuous batching: what P/D is compared with.

`python -m kvxfer.bench.serving.colocated` answers the same Generate as a decode worker. Each step
of its model computes one chunk of the oldest prompt that has begun, then a token of each sequence
that runs: prefill in chunks, so that it holds decode up for one chunk at a time. Layers, kernels,
cache, chunks and wire are those of the workers; nothing is handed over, nothing is kept for later
prompts.

| request    | what happens                             | leaves by                              |
| ---        | ---                                      | ---                                    |
| waiting    | no blocks yet, oldest first              | blocks and a place → prefilling        |
| prefilling | a chunk a step; one request at a time    | the last chunk → running, or the end   |
| running    | a token a step                           | length, stop → the end                 |

A cancel, or a deadline while it waits, ends it at the next step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvxfer.cache.footprint import blocks_needed, decoder_start, has_encoder, prompt_chunks
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.table import BlockTable
from kvxfer.command import run_command
from kvxfer.config import WorkerOptions
from kvxfer.control.router_messages import Cancel, Finished, Generate, Token, TransferStats
from kvxfer.errors import KvxferError, UsageError
from kvxfer.model.packing import SequenceStep
from kvxfer.model.sampling import SampleSpec
from kvxfer.transfer.digest import prompt_digests
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.loop import Handler
from kvxfer.worker.process import run_worker
from kvxfer.worker.start import Runner


@dataclass(eq=False)
class Running:
    """One request. `blocks` are its own from when it begins."""

    key: str
    generate: Generate
    deadline_s: float
    chunks: list[range]
    blocks: list[list[int]] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    kv_digests: list[str] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def tables(self) -> list[BlockTable]:
        return [BlockTable(ids) for ids in self.blocks]

    @property
    def sample(self) -> SampleSpec:
        sampling = self.generate.sampling
        return SampleSpec(sampling.temperature, sampling.top_p, sampling.seed)

    def next_chunk(self) -> SequenceStep:
        chunk = self.chunks[0]
        sample = self.sample if len(self.chunks) == 1 else None
        tokens = self.generate.tokens[chunk.start : chunk.stop]
        return SequenceStep(tokens, chunk.start, self.tables, sample)

    def finish_reason(self) -> str:
        """'' while it goes on."""
        if self.is_cancelled:
            return "cancelled"
        if self.output and self.output[-1] in self.generate.stop_token_ids:
            return "stop"
        return "length" if len(self.output) >= self.generate.max_new_tokens else ""


@dataclass(frozen=True, slots=True)
class _Step:
    """What the model computes at once."""

    prefilling: Running | None
    running: Sequence[Running]


def compute(
    runner: Runner,
    cache: KVCache,
    chunk: SequenceStep | None,
    steps: Sequence[SequenceStep],
    num_verified: int,
) -> tuple[int | None, list[str], list[int]]:
    """The chunk's token, the digests of so many tokens of its prompt (none if 0), and the tokens of
    `steps`. Model thread."""
    token, digests = None, list[str]()
    if chunk is not None:
        token = runner.prefill_chunk(chunk)
        if num_verified:
            digests = prompt_digests(cache, chunk.tables, num_verified)
    return token, digests, runner.decode_step(steps) if steps else []


class Colocated:
    """Control thread only."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._waiting: deque[Running] = deque()
        self._prefilling: Running | None = None
        self._running: list[Running] = []
        self._is_computing = False
        self.handlers: dict[type, Handler] = {
            Generate: self._on_generate,
            Cancel: self._on_cancel,
        }
        parts.growth.on_settled = self._pump
        parts.metrics.load = lambda: (len(self._running), len(self._waiting))

    def _on_generate(self, key: str, generate: Generate) -> None:
        options, specs = self._parts.options, self._parts.engine.specs
        chunks = prompt_chunks(specs, len(generate.tokens), options.max_num_batched_tokens)
        deadline_s = time.monotonic() + options.request_timeout_s
        one = Running(key, generate, deadline_s, chunks)
        problem = self._parts.engine.why_too_long(len(generate.tokens), generate.max_new_tokens)
        if problem:
            self._finish(one, "refused", problem)
        elif problem := self._parts.residency.refusal or self._parts.draining.reason:
            self._finish(one, "error", problem)
        elif len(self._waiting) >= options.max_num_queued_seqs:
            self._finish(one, "overloaded", "this process's queue is full")
        else:
            self._waiting.append(one)
            self._pump()

    def _on_cancel(self, key: str, cancel: Cancel) -> None:
        for one in [*self._waiting, *self._begun()]:
            if (one.key, one.generate.request_id) == (key, cancel.request_id):
                one.is_cancelled = True
        self._pump()

    def _begun(self) -> list[Running]:
        return [*([self._prefilling] if self._prefilling else []), *self._running]

    # --- steps --------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Begin the next step, unless one is being computed."""
        if self._is_computing:
            return
        self._drop_ended()
        if self._prefilling is None:
            self._begin_one()
        step = _Step(self._prefilling, list(self._running))
        if step.prefilling is None and not step.running:
            return
        self._is_computing = True
        engine, first = self._parts.engine, step.prefilling
        chunk = first.next_chunk() if first else None
        is_last = first is not None and len(first.chunks) == 1
        num_verified = len(first.generate.tokens) if first and is_last else 0
        if first and not first.generate.verify:
            num_verified = 0
        steps = [self._next_step(one) for one in step.running]
        self._parts.steps.submit(
            partial(compute, engine.runner, engine.cache, chunk, steps, num_verified),
            partial(self._computed, step),
            partial(self._failed, step),
        )

    def _begin_one(self) -> None:
        """The oldest that waits, if there is a place and blocks for all it may become."""
        if not self._waiting or len(self._running) >= self._parts.options.max_num_seqs:
            return
        engine, one = self._parts.engine, self._waiting[0]
        sizes = len(one.generate.tokens), one.generate.max_new_tokens
        chunk_tokens = self._parts.options.max_num_batched_tokens
        needed = blocks_needed(engine.specs, *sizes, chunk_tokens)
        if not engine.pools.can_allocate(needed):
            if self._parts.growth.is_idle:
                self._parts.growth.request_for(needed)
            return
        self._waiting.popleft()
        one.blocks = engine.pools.allocate(needed)
        self._prefilling = one

    def _next_step(self, one: Running) -> SequenceStep:
        specs, num_prompt = self._parts.engine.specs, len(one.generate.tokens)
        position = decoder_start(specs, num_prompt) + len(one.output) - 1
        num_encoder = num_prompt if has_encoder(specs) else 0
        return SequenceStep(one.output[-1:], position, one.tables, one.sample, num_encoder)

    def _computed(self, step: _Step, found: tuple[int | None, list[str], list[int]]) -> None:
        self._is_computing = False
        token, digests, tokens = found
        for one, next_token in zip(step.running, tokens, strict=True):
            self._tell(one, next_token)
        if (first := step.prefilling) is not None:
            del first.chunks[0]
            if not first.chunks:
                assert token is not None, "the last chunk samples"
                first.kv_digests = digests
                self._prefilling = None
                self._running.append(first)
                self._tell(first, token)
        self._pump()

    def _tell(self, one: Running, token: int) -> None:
        one.output.append(token)
        index = len(one.output) - 1
        self._parts.peers.send(one.key, Token(one.generate.request_id, index, token))

    def _failed(self, step: _Step, error: KvxferError) -> None:
        self._is_computing = False
        for one in self._begun():
            self._leave(one)
            self._finish(one, "error", str(error))
        self._pump()

    # --- ends ---------------------------------------------------------------------------------

    def _drop_ended(self) -> None:
        """Whose end has come. Nothing is being computed."""
        now_s = time.monotonic()
        for one in list(self._waiting):
            if one.is_cancelled or now_s > one.deadline_s:
                self._waiting.remove(one)
                late = "" if one.is_cancelled else "its deadline passed before there were blocks"
                self._finish(one, "error" if late else "cancelled", late)
        for one in self._begun():
            if reason := one.finish_reason():
                self._leave(one)
                self._finish(one, reason, "")

    def _leave(self, one: Running) -> None:
        self._parts.engine.pools.free(one.blocks)
        if self._prefilling is one:
            self._prefilling = None
        else:
            self._running.remove(one)

    def _finish(self, one: Running, reason: str, error: str) -> None:
        name, count = one.generate.request_id, len(one.output)
        end = Finished(name, reason, error, 0, TransferStats(), one.kv_digests, count, 0.0)
        self._parts.metrics.ended(reason)
        self._parts.peers.send(one.key, end)

    @property
    def is_serving(self) -> bool:
        return self._is_computing or bool(self._waiting) or bool(self._begun())

    is_busy = is_serving

    def tick(self) -> None:
        if self._waiting:
            self._pump()

    def status(self) -> dict[str, int | float | str]:
        return self._parts.status() | {"peers": 1}  # a router's prompts need nobody else


def colocated(options: WorkerOptions) -> int:
    """Run one process that prefills and decodes by itself, many sequences at once."""
    if options.tensor_parallel_size != 1:
        raise UsageError(
            "tensor_parallel_size", options.tensor_parallel_size, "a single process has one rank"
        )
    return run_worker("decode", options, (), Colocated)


if __name__ == "__main__":
    run_command(colocated, "python -m kvxfer.bench.serving.colocated", "decode")
