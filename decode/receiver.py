"""How a prompt's KV arrives, and the proof that all of it did."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence

from decode.schedule import DecodeRequest, RequestState
from kvxfer.cache.footprint import travelling
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.pools import reaches
from kvxfer.control.admission_messages import Granted
from kvxfer.control.messages import Confirmed, Done, Grant, PrefillRequest, Ready, Taken
from kvxfer.control.session import Peer
from kvxfer.errors import WireError
from kvxfer.telemetry.trace import Trace
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.rank_plans import RankPlans, WorkerSide
from kvxfer.transfer.regions import RegionSet
from kvxfer.transfer.sides import why_not_blocks
from kvxfer.worker.peers import PeerTable
from kvxfer.worker.stats import add_movement
from kvxfer.worker.transfer_thread import Movement, TransferThread

logger = logging.getLogger(__name__)


class Receiver:
    """Control thread only. `regions` tells what our cache has registered now."""

    def __init__(
        self,
        cache: KVCache,
        transfer: TransferThread,
        peers: PeerTable,
        regions: Callable[[], RegionSet],
        trace: Trace,
    ) -> None:
        self._cache = cache
        self._size = transfer.size
        self._transfer = transfer
        self._peers = peers
        self._regions = regions
        self._trace = trace
        self.on_failed: Callable[[DecodeRequest, str], None] = lambda request, reason: None
        self.on_quiet: Callable[[DecodeRequest], None] = lambda request: None
        """A read of ours ended on a request that is ABORTING."""

    def ask(self, request: DecodeRequest, peer: Peer, timeout_s: float) -> None:
        """Have `peer` prefill into the request's blocks, a right that is used once, or queue for it
        while it has none: `grant` follows then."""
        generate = request.generate
        request.prefill, request.lane = peer, peer.lane
        request.grant_id = secrets.token_hex(8)
        request.state = RequestState.GRANTED if request.blocks else RequestState.ASKED
        blocks = request.prompt_blocks if request.blocks else None
        grant = Grant(request.grant_id, blocks, timeout_s)
        self._peers.send(
            peer.key,
            PrefillRequest(
                request.request_id,
                generate.tokens,
                generate.sampling,
                grant,
                request.wants_digest,
            ),
        )

    def grant(self, request: DecodeRequest) -> None:
        """Name the blocks that prefill has asked for."""
        assert request.prefill is not None
        request.state = RequestState.GRANTED
        granted = Granted(request.request_id, request.grant_id, request.prompt_blocks)
        self._peers.send(request.prefill.key, granted)

    def read(self, request: DecodeRequest, ready: Ready) -> None:
        """Pull what prefill offers. Raises WireError, PlanError, RegionError."""
        peer = request.prefill
        assert peer is not None
        layers = self._next_layers(request, ready)
        computed = range(ready.start, ready.stop)
        leased, planned = ready.lease.blocks, (request.planned_tokens, request.lease_blocks)
        if request.plans is None or planned != (computed, leased):
            request.plans = self._plans(request, peer, computed, leased)
            request.planned_tokens, request.lease_blocks = computed, leased
        moves = request.plans.moves(layers)
        assert request.lane is not None
        request.lane = peer.lane_for(request.lane, moves)
        if request.tokens_read == 0 and not any(request.layers_read):
            self._trace.event("transfer_start", request=request.request_id, lane=str(request.lane))
        self._advance(request, ready, layers)
        request.offer_is_final = ready.final
        request.reads_in_flight += 1

        def ended(movement: Movement) -> None:
            request.reads_in_flight -= 1
            request.stats = add_movement(request.stats, movement)
            self._read_ended(request, movement)

        self._transfer.move_ranks(peer.key, request.lane, moves, ended)

    def _plans(
        self, request: DecodeRequest, peer: Peer, tokens: range, leased: list[list[int]]
    ) -> RankPlans:
        """Of all layers of `tokens`, which come piece by piece. Raises as `read`."""
        assert peer.facts is not None
        num_prompt = request.num_prompt_tokens
        wrong = why_not_blocks(peer.facts.geometry, leased, num_prompt)
        if wrong:
            raise WireError(f"request {request.request_id}: lease: {wrong}")
        geometry, theirs = self._cache.geometry, peer.facts.geometry
        size = peer.facts.tensor_parallel_size
        source = WorkerSide(theirs, size, peer.regions, leased)
        target = WorkerSide(geometry, self._size, self._regions(), request.prompt_blocks)
        moved = travelling(geometry.specs, num_prompt, tokens, theirs.specs)
        return RankPlans(source, target, num_prompt, moved)

    def _next_layers(self, request: DecodeRequest, ready: Ready) -> list[range]:
        """The layers offered, if they and their tokens follow what was offered before; else
        WireError. What is skipped would never arrive."""
        before = request.layers_read or [0] * len(request.specs)
        in_order = ready.start == request.tokens_read < ready.stop <= request.num_prompt_tokens
        same_stretch = ready.stop == request.stretch_end or not any(before)
        layers = [range(first, end) for first, end in ready.layers]
        whole = [spec.num_layers for spec in request.specs]
        fits = [one.start for one in layers] == before and all(
            one.start <= one.stop <= end for one, end in zip(layers, whole, strict=True)
        )
        if not (in_order and same_stretch and fits and any(layers)) or request.offer_is_final:
            raise WireError(f"request {request.request_id}: Ready does not follow what came before")
        is_last = [one.stop for one in layers] == whole and ready.stop == request.num_prompt_tokens
        if ready.final and not is_last:
            raise WireError(f"request {request.request_id}: Ready is final before all was offered")
        return layers

    def _advance(self, request: DecodeRequest, ready: Ready, layers: Sequence[range]) -> None:
        request.layers_read = [one.stop for one in layers]
        request.stretch_end = ready.stop
        if request.layers_read == [spec.num_layers for spec in request.specs]:
            request.tokens_read, request.layers_read = ready.stop, []

    def _read_ended(self, request: DecodeRequest, movement: Movement) -> None:
        if request.state is RequestState.ABORTING:
            self.on_quiet(request)
        elif movement.error:
            self.on_failed(request, f"pull failed: {movement.error}")
        elif request.offer_is_final and request.reads_in_flight == 0:
            assert request.prefill is not None
            self._peers.send(request.prefill.key, Taken(request.request_id, request.grant_id))

    def revoked(self, requests: Iterable[DecodeRequest], peer: Peer, lowest: Sequence[int]) -> None:
        """`peer` takes its blocks from `lowest` on back, group by group: reads of them prove
        nothing any more."""
        for request in list(requests):
            is_read = request.prefill is peer and request.state is RequestState.GRANTED
            if is_read and request.lease_blocks and reaches(request.lease_blocks, lowest):
                self.on_failed(request, f"{peer.name} revoked memory that it had leased")

    def prove_pulled(self, request: DecodeRequest, confirmed: Confirmed) -> None:
        """Raises WireError unless everything was read under the lease that is confirmed, and the
        first token is there."""
        complete = (
            request.offer_is_final
            and request.reads_in_flight == 0
            and request.tokens_read == request.num_prompt_tokens
            and request.output
        )
        if not complete:
            raise WireError(f"request {request.request_id}: Confirmed before all was read")
        self._filled(request)

    def prove_pushed(self, request: DecodeRequest, done: Done) -> None:
        """Raises WireError unless the grant was used for all tokens of all layers, in all ranks,
        and the first token is there."""
        covered = (done.grant_id, done.num_tokens, done.num_layers, done.num_ranks)
        layers = self._cache.geometry.num_layers
        expected = (request.grant_id, request.num_prompt_tokens, layers, self._size)
        if not request.output:
            raise WireError(f"request {request.request_id}: Done before the first token")
        if covered != expected:
            raise WireError(
                f"request {request.request_id}: Done covers {covered}, expected {expected}"
            )
        request.stats = done.transfer
        self._filled(request)

    def _filled(self, request: DecodeRequest) -> None:
        request.state = RequestState.FILLED
        stats = request.stats
        lane = str(request.lane)
        if request.direction is Direction.PULL:
            self._trace.event(
                "transfer_end",
                request=request.request_id,
                lane=lane,
                start_ns=stats.start_ns,
                end_ns=stats.end_ns,
                num_bytes=stats.num_bytes,
            )
        blocks = request.prompt_blocks
        self._trace.event("filled", request=request.request_id, blocks=blocks, lane=lane)
