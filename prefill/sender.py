"""How computed KV leaves: pushed by us, or read by decode under a lease."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvxfer.cache.footprint import prompt_entries, travelling
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.table import BlockTable
from kvxfer.control.messages import Confirmed, Done, Lease, Ready
from kvxfer.control.resync_messages import GrantQuery
from kvxfer.errors import WireError
from kvxfer.telemetry.trace import Trace
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.rank_plans import RankPlans, WorkerSide
from kvxfer.transfer.regions import RegionSet
from kvxfer.worker.peers import PeerTable
from kvxfer.worker.stats import add_movement
from kvxfer.worker.transfer_thread import Movement, TransferThread
from prefill.job import PrefillJob

logger = logging.getLogger(__name__)

Settle = Callable[[PrefillJob], None]
"""Called when something of a job ended; the worker looks whether all of it has."""


class Sender:
    """Control thread only. `regions` tells what our cache has registered now."""

    def __init__(
        self,
        cache: KVCache,
        transfer: TransferThread,
        peers: PeerTable,
        regions: Callable[[], RegionSet],
        trace: Trace,
        settle: Settle,
    ) -> None:
        self._cache = cache
        self._size = transfer.size
        self._transfer = transfer
        self._peers = peers
        self._regions = regions
        self._trace = trace
        self._settle = settle

    def hand_over(
        self, job: PrefillJob, tokens: range, layers: Sequence[range], timeout_s: float
    ) -> None:
        """Send the KV of `tokens`, some that decode lacks, in `layers`, group by group, which was
        just computed, on its way. Raises PlanError, RegionError."""
        if job.direction is Direction.PUSH:
            self._push(job, tokens, layers)
        else:
            self._offer(job, tokens, layers, timeout_s)

    def _push(self, job: PrefillJob, tokens: range, layers: Sequence[range]) -> None:
        if job.plans is None or job.planned_tokens != tokens:
            job.plans, job.planned_tokens = self._plans(job, tokens), tokens
        moves = job.plans.moves(layers)
        assert job.lane is not None
        job.lane = job.peer.lane_for(job.lane, moves)
        if tokens.start == job.handed_from and not any(one.start for one in layers):
            self._trace.event("transfer_start", request=job.request.request_id, lane=str(job.lane))
        job.moves_in_flight += 1

        def ended(movement: Movement) -> None:
            job.moves_in_flight -= 1
            job.stats = add_movement(job.stats, movement)
            if movement.error and not job.failure:
                job.failure = f"push to {job.peer.name} failed: {movement.error}"
            self._settle(job)

        self._transfer.move_ranks(job.peer.key, job.lane, moves, ended)

    def _plans(self, job: PrefillJob, tokens: range) -> RankPlans:
        """Of all layers of `tokens`, which leave piece by piece."""
        facts = job.peer.facts
        assert facts is not None
        num_prompt, geometry = len(job.request.tokens), self._cache.geometry
        cached = job.handed_from
        source = WorkerSide(geometry, self._size, self._regions(), self.kept(job), cached)
        size = facts.tensor_parallel_size
        target = WorkerSide(facts.geometry, size, job.peer.regions, job.granted, cached)
        job.num_ranks_reached = size
        moved = travelling(geometry.specs, num_prompt, tokens, facts.geometry.specs)
        return RankPlans(source, target, num_prompt, moved)

    def _offer(
        self, job: PrefillJob, tokens: range, layers: Sequence[range], timeout_s: float
    ) -> None:
        ends = [spec.num_layers for spec in self._cache.geometry.specs]
        is_whole = [one.stop for one in layers] == ends
        final = is_whole and tokens.stop == len(job.request.tokens)
        lease = Lease(job.request.grant.grant_id, self.kept(job), timeout_s)
        stretches = [(one.start, one.stop) for one in layers]
        ready = Ready(job.request.request_id, lease, tokens.start, tokens.stop, stretches, final)
        self._peers.send(job.peer.key, ready)

    def offer_again(self, job: PrefillJob, query: GrantQuery, timeout_s: float) -> None:
        """What decode was not offered of a prompt that is computed, as its query tells: one from
        before its blocks were named tells of no token. Raises WireError where that cannot be."""
        num_prompt, ends = len(job.request.tokens), self._cache.geometry.specs
        whole = [range(spec.num_layers) for spec in ends]
        is_early = query.tokens_read == 0 and not query.layers_read
        start, end = job.handed_from if is_early else query.tokens_read, query.stretch_end
        is_inside = job.handed_from <= start <= num_prompt
        if not is_inside or (query.layers_read and not start < end <= num_prompt):
            raise WireError(f"GrantQuery of tokens [{start}, {end}) of {num_prompt}")
        if query.layers_read:
            if len(query.layers_read) != len(whole) or not all(
                0 <= first <= one.stop for first, one in zip(query.layers_read, whole, strict=True)
            ):
                raise WireError(f"GrantQuery of layers {query.layers_read}")
            left = [one[first:] for first, one in zip(query.layers_read, whole, strict=True)]
            self._offer(job, range(start, end), left, timeout_s)
            start = end
        if start < num_prompt:
            self._offer(job, range(start, num_prompt), whole, timeout_s)

    def kept(self, job: PrefillJob) -> list[list[int]]:
        """The blocks of what travels, group by group."""
        tokens, specs = job.handed_over, self._cache.geometry.specs
        entries = prompt_entries(specs, tokens.stop, tokens.start)
        pairs = zip(job.blocks, entries, strict=True)
        return [BlockTable(blocks).ids(kept) for blocks, kept in pairs]

    def complete(self, job: PrefillJob) -> Done | Confirmed:
        """Everything was pushed and is visible, or what decode pulled is valid: the word of it."""
        request, first_token = job.request, job.first_token
        assert first_token is not None
        if job.direction is Direction.PUSH:
            stats = job.stats
            self._trace.event(
                "transfer_end",
                request=request.request_id,
                lane=str(job.lane),
                start_ns=stats.start_ns,
                end_ns=stats.end_ns,
                num_bytes=stats.num_bytes,
            )
            layers = self._cache.geometry.num_layers
            return Done(
                request.request_id,
                request.grant.grant_id,
                job.computed,
                job.handed_from,
                layers,
                job.num_ranks_reached,
                first_token,
                stats,
                job.digest,
            )
        return Confirmed(request.request_id, request.grant.grant_id, first_token, job.digest)
