"""What a prefill worker computes next: jobs in chunks, decode workers in turn, one job at a time.

States: see `prefill.job`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvxfer.cache.footprint import blocks_needed, prompt_chunks
from kvxfer.cache.pools import BlockPools
from kvxfer.cache.prefix_cache import PrefixCache
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.model.runner import SequenceStep
from kvxfer.model.sampling import SampleSpec
from kvxfer.worker.service_times import ServiceTimes
from prefill.job import NOT_STARTED, JobState, PrefillJob
from prefill.queue import JobQueue


class PrefillScheduler:
    """The queue, and the job that computes. Control thread only."""

    def __init__(
        self,
        pools: BlockPools,
        chunk_tokens: int,
        specs: Sequence[KVCacheSpec],
        prefix_cache: PrefixCache,
        max_queued: int = 1024,
    ) -> None:
        """`max_queued`: most jobs of one decode worker that wait."""
        self._pools = pools
        self._prefix_cache = prefix_cache
        self._chunk_tokens = chunk_tokens
        self._specs = specs
        self._queue = JobQueue(max_queued)
        self._service = ServiceTimes()
        self.current: PrefillJob | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def busy_for_s(self, peer: str) -> float:
        """When a decode worker whose share of the queue is full may try again; 0: now."""
        return self._service.wait_s(len(self._queue)) if self._queue.is_full(peer) else 0.0

    def add(self, job: PrefillJob) -> None:
        job.hashes = self._prefix_cache.hashes(job.request.tokens)
        self._queue.add(job)

    def to_call(self) -> list[PrefillJob]:
        """As `JobQueue.to_call`."""
        return self._queue.to_call()

    def remove(self, job: PrefillJob) -> None:
        """Drop a job that is given up: it is computed no further."""
        if job.state in NOT_STARTED:
            self._queue.remove(job)
        if self.current is job:
            self.current = None

    def finish(self, job: PrefillJob) -> None:
        """A job has ended: one that was started makes room for another of its decode worker."""
        if job.is_started:
            self._queue.finish(job)

    def wanted_blocks(self) -> list[int]:
        """Blocks of each group that the job at the front waits for; empty if it can start."""
        job = self._queue.next() if self.current is None else None
        if job is None:
            return []
        cost = self._prefix_cache.cost(self._needed(job), self._prefix(job))
        return [] if self._pools.can_allocate(cost) else cost

    def next_chunk(self) -> tuple[PrefillJob, SequenceStep] | None:
        """The next chunk to compute; a waiting job gets its blocks here, when it can."""
        if self.current is None:
            job = self._queue.next()
            if job is None or not self._start(job):
                return None
        if self.current is None or self.current.chunk_running:
            return None
        return self.current, self._chunk(self.current)

    def _start(self, job: PrefillJob) -> bool:
        """Whether there are blocks for it."""
        needed, prefix = self._needed(job), self._prefix(job)
        if not self._pools.can_allocate(self._prefix_cache.cost(needed, prefix)):
            return False
        job.blocks = self._prefix_cache.allocate(needed, prefix)
        job.num_cached = len(prefix[0]) * self._specs[0].block_size
        job.computed = job.num_cached
        self._prefix_cache.count(len(job.request.tokens), job.num_cached)
        self._queue.start(job)
        self._service.left(len(self._queue))
        job.state, job.is_started = JobState.COMPUTING, True
        self.current = job
        return True

    def finish_chunk(self, job: PrefillJob, step: SequenceStep, token: int | None) -> range:
        """Account for a computed chunk; returns the tokens it added."""
        job.chunk_running = False
        start, job.computed = job.computed, step.start + len(step.tokens)
        self._prefix_cache.insert(job.hashes, job.blocks, range(start, job.computed))
        if job.computed == len(job.request.tokens):
            job.first_token = token
            if job.state is JobState.COMPUTING:
                job.state = JobState.HANDING_OVER
            self.remove(job)
        return range(start, job.computed)

    def _needed(self, job: PrefillJob) -> list[int]:
        return blocks_needed(self._specs, len(job.request.tokens), 0, self._chunk_tokens)

    def _prefix(self, job: PrefillJob) -> list[list[int]]:
        return self._prefix_cache.lookup(job.hashes, len(job.request.tokens))

    def _chunk(self, job: PrefillJob) -> SequenceStep:
        """The next tokens, up to where a chunk ends that begins with the prompt, cached or not: so
        that as few bits as can be depend on what was cached."""
        tokens = job.request.tokens
        chunks = prompt_chunks(self._specs, len(tokens), self._chunk_tokens)
        stop = chunks[job.computed // len(chunks[0])].stop
        sampling = job.request.sampling
        spec = SampleSpec(sampling.temperature, sampling.top_p, sampling.seed)
        return SequenceStep(
            tokens=tokens[job.computed : stop],
            start=job.computed,
            tables=[BlockTable(blocks) for blocks in job.blocks],
            sample=spec if stop == len(tokens) else None,
        )
