"""One process that prefills and decodes, with no transfer: what every hand-over is compared with.

It answers the same Generate as a decode worker, one request after another. Run by the demo and by
tests as `python -m kvxfer.worker.single`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvxfer.cache.footprint import blocks_needed, decoder_start, has_encoder, prompt_chunks
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.table import BlockTable
from kvxfer.command import run_command
from kvxfer.config import WorkerOptions
from kvxfer.control.router_messages import Finished, Generate, Token, TransferStats
from kvxfer.errors import KvxferError, UsageError
from kvxfer.model.runner import SequenceStep
from kvxfer.model.sampling import SampleSpec
from kvxfer.transfer.digest import prompt_digests
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.loop import Handler
from kvxfer.worker.process import run_worker
from kvxfer.worker.start import Runner


@dataclass(frozen=True, slots=True)
class _Answer:
    tokens: list[int]
    kv_digests: list[str]


_NOTHING = _Answer([], [])


def generate(
    runner: Runner,
    cache: KVCache,
    request: Generate,
    tables: Sequence[BlockTable],
    chunk_tokens: int,
) -> _Answer:
    """The whole of one request in the chunks and steps that P + D use. Model thread."""
    sampling = request.sampling
    spec = SampleSpec(sampling.temperature, sampling.top_p, sampling.seed)
    prompt, specs = request.tokens, cache.geometry.specs
    token: int | None = None
    for chunk in prompt_chunks(specs, len(prompt), chunk_tokens):
        sample = spec if chunk.stop == len(prompt) else None
        tokens = prompt[chunk.start : chunk.stop]
        token = runner.prefill_chunk(SequenceStep(tokens, chunk.start, tables, sample))
    assert token is not None
    digests = prompt_digests(cache, tables, len(prompt)) if request.verify else []
    output = [token]
    start = decoder_start(specs, len(prompt))
    num_encoder = len(prompt) if has_encoder(specs) else 0
    while len(output) < request.max_new_tokens and output[-1] not in request.stop_token_ids:
        position = start + len(output) - 1
        step = SequenceStep(output[-1:], position, tables, spec, num_encoder)
        output += runner.decode_step([step])
    return _Answer(output, digests)


class SingleWorker:
    """Requests in order of arrival, one at a time."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._waiting: deque[tuple[str, Generate]] = deque()
        self._is_busy = False
        self.handlers: dict[type, Handler] = {Generate: self._on_generate}
        parts.growth.on_settled = self._pump
        parts.metrics.load = lambda: (int(self._is_busy), len(self._waiting))

    def _on_generate(self, key: str, request: Generate) -> None:
        if self._parts.residency.refusal:
            self._finish(key, request, "error", self._parts.residency.refusal)
            return
        if self._parts.draining.reason:
            self._finish(key, request, "overloaded", self._parts.draining.reason)
            return
        self._waiting.append((key, request))
        self._pump()

    def _pump(self) -> None:
        if self._is_busy or not self._waiting:
            return
        engine = self._parts.engine
        key, request = self._waiting[0]
        chunk = self._parts.options.max_num_batched_tokens
        lengths = len(request.tokens), request.max_new_tokens
        needed = blocks_needed(engine.specs, *lengths, chunk)
        if problem := engine.why_too_long(*lengths):
            self._waiting.popleft()
            self._finish(key, request, "error", problem)
        elif not engine.pools.can_allocate(needed):
            self._parts.growth.request_for(needed)
        else:
            self._waiting.popleft()
            self._is_busy = True
            blocks = engine.pools.allocate(needed)
            tables = [BlockTable(ids) for ids in blocks]
            self._parts.model.submit(
                partial(generate, engine.runner, engine.cache, request, tables, chunk),
                partial(self._answered, key, request, blocks),
                partial(self._failed, key, request, blocks),
            )

    def _failed(
        self, key: str, request: Generate, blocks: list[list[int]], error: KvxferError
    ) -> None:
        self._is_busy = False
        self._parts.engine.pools.free(blocks)
        self._finish(key, request, "error", str(error))
        self._pump()

    def _answered(
        self, key: str, request: Generate, blocks: list[list[int]], answer: _Answer
    ) -> None:
        self._is_busy = False
        self._parts.engine.pools.free(blocks)
        for index, token in enumerate(answer.tokens):
            self._parts.peers.send(key, Token(request.request_id, index, token))
        stopped = answer.tokens[-1] in request.stop_token_ids
        self._finish(key, request, "stop" if stopped else "length", "", answer)
        self._pump()

    def _finish(
        self, key: str, request: Generate, reason: str, error: str, answer: _Answer = _NOTHING
    ) -> None:
        digests, count, none = answer.kv_digests, len(answer.tokens), TransferStats()
        finished = Finished(request.request_id, reason, error, 0, none, digests, count, 0.0)
        self._parts.metrics.ended(reason)
        self._parts.peers.send(key, finished)

    @property
    def is_serving(self) -> bool:
        return self._is_busy or bool(self._waiting)

    is_busy = is_serving

    def tick(self) -> None:
        pass

    def status(self) -> dict[str, int | float | str]:
        return self._parts.status()


def single(options: WorkerOptions) -> int:
    """Run one process that prefills and decodes by itself: the reference for `kvxfer demo`."""
    if options.tensor_parallel_size != 1:
        reason = "the process that others are compared with is one"
        raise UsageError("tensor_parallel_size", options.tensor_parallel_size, reason)
    return run_worker("single", options, (), SingleWorker)


if __name__ == "__main__":
    run_command(single, "python -m kvxfer.worker.single")
