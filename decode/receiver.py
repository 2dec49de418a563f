"""How a prompt's KV arrives, and the proof that all of it did."""

from __future__ import annotations

import enum
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

from decode.schedule import DecodeRequest, RequestState
from kvxfer.cache.footprint import travelling
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.pools import Blocks, reaches
from kvxfer.control.admission_messages import Granted
from kvxfer.control.messages import Done, Grant, PrefillRequest, Ready, Taken
from kvxfer.control.resync_messages import GrantQuery
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


GAP_PAUSE_S = 0.05
"""What was skipped may be on its way; then it is asked for."""


class Place(enum.Enum):
    """Of an offer among those that came: it continues them, is one of them, or skips some, which
    would never arrive."""

    NEXT = enum.auto()
    BEFORE = enum.auto()
    LATER = enum.auto()


def place_of(request: DecodeRequest, ready: Ready, layers: Sequence[range]) -> Place:
    before = request.layers_read or [0] * len(request.specs)
    started = any(before)
    is_here = ready.start == request.tokens_read
    is_stretch = is_here and (not started or ready.stop == request.stretch_end)
    pairs = list(zip(layers, before, strict=True))
    if ready.stop <= request.tokens_read or (
        started and is_stretch and all(one.stop <= at for one, at in pairs)
    ):
        return Place.BEFORE
    if is_stretch and all(one.start == at for one, at in pairs):
        return Place.NEXT
    return Place.LATER


class Receiver:
    """Control thread only. `regions` tells what our cache has registered now."""

    def __init__(
        self,
        cache: KVCache,
        transfer: TransferThread,
        peers: PeerTable,
        regions: Callable[[], RegionSet],
        trace: Trace,
        check_exclusive: Callable[[Blocks], None],
    ) -> None:
        """`check_exclusive` raises CacheError for blocks that others than their holder may read."""
        self._cache = cache
        self._size = transfer.size
        self._transfer = transfer
        self._peers = peers
        self._regions = regions
        self._trace = trace
        self._check_exclusive = check_exclusive
        self.on_failed: Callable[[DecodeRequest, str], None] = lambda request, reason: None
        self.on_quiet: Callable[[DecodeRequest], None] = lambda request: None
        """A read of ours ended on a request that is ABORTING."""

    def ask(self, request: DecodeRequest, peer: Peer) -> None:
        """Have `peer` prefill into the request's blocks, a right that is used once, or queue for it
        while it has none: `grant` follows then."""
        request.prefill, request.lane = peer, peer.lane
        request.prefill_name = peer.name
        request.grant_id = secrets.token_hex(8)
        request.state = RequestState.GRANTED if request.blocks else RequestState.ASKED
        self.ask_for(request)

    def ask_for(self, request: DecodeRequest) -> None:
        """Say what is asked, and granted, as often as it takes: the grant is used once."""
        peer, generate, now_s = request.prefill, request.generate, time.monotonic()
        assert peer is not None
        request.asked(now_s)
        timeout_s = max(0.001, request.deadline_s - now_s)
        blocks = self._named(request) if request.blocks else None
        grant = Grant(request.grant_id, blocks, timeout_s, request.num_cached)
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
        """Name the blocks that prefill has asked for, as often as it asks."""
        assert request.prefill is not None
        request.state = RequestState.GRANTED
        request.asked(time.monotonic())
        ids, blocks = (request.request_id, request.grant_id), self._named(request)
        self._peers.send(request.prefill.key, Granted(*ids, blocks, request.num_cached))

    def _named(self, request: DecodeRequest) -> list[list[int]]:
        """The blocks that prefill may write to. Raises CacheError for one that holds, or may come
        to hold, what another request reads: a bug of ours."""
        blocks = request.handed_blocks
        self._check_exclusive(blocks)
        return blocks

    def ask_again(self, request: DecodeRequest) -> None:
        """Nothing was heard for a while: one of us may have spoken in vain."""
        assert request.prefill is not None
        request.asked(time.monotonic())
        ids = request.request_id, request.grant_id
        if request.offer_is_final and request.reads_in_flight == 0:
            self._peers.send(request.prefill.key, Taken(*ids))
            return
        query = GrantQuery(
            *ids, request.tokens_read, list(request.layers_read), request.stretch_end
        )
        self._peers.send(request.prefill.key, query)

    def read(self, request: DecodeRequest, ready: Ready) -> None:
        """Pull what prefill offers. What was offered before is not read again, and of what comes
        after something that did not, nothing is. Raises WireError, PlanError, RegionError."""
        peer = request.prefill
        assert peer is not None
        layers = self._checked_layers(request, ready)
        place = place_of(request, ready, layers)
        if place is not Place.NEXT:
            if place is Place.LATER:
                request.ask_at_s = min(request.ask_at_s, time.monotonic() + GAP_PAUSE_S)
            return
        computed = range(ready.start, ready.stop)
        leased, planned = ready.lease.blocks, (request.planned_tokens, request.lease_blocks)
        if request.plans is None or planned != (computed, leased):
            request.plans = self._plans(request, peer, computed, leased)
            request.planned_tokens, request.lease_blocks = computed, leased
        moves = request.plans.moves(layers)
        assert request.lane is not None
        request.lane = peer.lane_for(request.lane, moves)
        if request.tokens_read == request.num_cached and not any(request.layers_read):
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
        num_prompt, cached = request.num_prompt_tokens, request.num_cached
        wrong = why_not_blocks(peer.facts.geometry, leased, num_prompt, cached)
        if wrong:
            raise WireError(f"request {request.request_id}: lease: {wrong}")
        geometry, theirs = self._cache.geometry, peer.facts.geometry
        size = peer.facts.tensor_parallel_size
        source = WorkerSide(theirs, size, peer.regions, leased, cached)
        regions, blocks = self._regions(), request.handed_blocks
        target = WorkerSide(geometry, self._size, regions, blocks, cached)
        moved = travelling(geometry.specs, num_prompt, tokens, theirs.specs)
        return RankPlans(source, target, num_prompt, moved)

    def _checked_layers(self, request: DecodeRequest, ready: Ready) -> list[range]:
        """The layers offered. Raises WireError for what no prompt of this length has, and for what
        is here and shall not be written again."""
        layers = [range(first, end) for first, end in ready.layers]
        whole = [spec.num_layers for spec in request.specs]
        fits = len(layers) == len(whole) and all(
            0 <= one.start <= one.stop <= end for one, end in zip(layers, whole, strict=True)
        )
        in_prompt = request.num_cached <= ready.start < ready.stop <= request.num_prompt_tokens
        if not (in_prompt and fits and any(layers)):
            raise WireError(f"request {request.request_id}: Ready is of no part of the prompt")
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
            self.ask_again(request)

    def revoked(self, requests: Iterable[DecodeRequest], peer: Peer, lowest: Sequence[int]) -> None:
        """`peer` takes its blocks from `lowest` on back, group by group: reads of them prove
        nothing any more."""
        for request in list(requests):
            is_read = request.prefill is peer and request.state is RequestState.GRANTED
            if is_read and request.lease_blocks and reaches(request.lease_blocks, lowest):
                self.on_failed(request, f"{peer.name} revoked memory that it had leased")

    def prove_pulled(self, request: DecodeRequest) -> None:
        """Raises WireError unless everything was read under the lease that is confirmed."""
        is_read = request.offer_is_final and request.reads_in_flight == 0
        if not is_read or request.tokens_read != request.num_prompt_tokens:
            raise WireError(f"request {request.request_id}: Confirmed before all was read")

    def prove_pushed(self, request: DecodeRequest, done: Done) -> None:
        """Raises WireError unless the grant was used for all tokens but those that were here, of
        all layers, in all ranks."""
        tokens = done.num_cached_tokens, done.num_tokens
        covered = (done.grant_id, *tokens, done.num_layers, done.num_ranks)
        layers, tokens = (
            self._cache.geometry.num_layers,
            (request.num_cached, request.num_prompt_tokens),
        )
        expected = (request.grant_id, *tokens, layers, self._size)
        if covered != expected:
            raise WireError(
                f"request {request.request_id}: Done covers {covered}, expected {expected}"
            )
        request.stats = done.transfer

    def filled(self, request: DecodeRequest) -> None:
        """Its hand-over was proved, and the first token is known."""
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
