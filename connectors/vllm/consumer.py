"""A consumer's rank: from claims to KV that may be decoded from. Service thread only.

The states of a request's parts are in `parts`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from connectors.vllm.handover import Claim, Load, Source
from connectors.vllm.layout import LayerGroup
from connectors.vllm.links import Link, Links, LinkState
from connectors.vllm.messages import Abort, Confirmed, Failed, Message, Ready, Taken
from connectors.vllm.messages import Claim as ClaimMessage
from connectors.vllm.parts import ENDED, TIMED, Part, PartState, Request
from connectors.vllm.ranks import Share
from connectors.vllm.reading import reading_of
from connectors.vllm.stats import Stats
from kvxfer.errors import KvxferError, PlanError, TransferError
from kvxfer.transfer.endpoint import Endpoint

logger = logging.getLogger(__name__)


class Consumer:
    def __init__(
        self,
        endpoint: Endpoint,
        groups: Sequence[LayerGroup],
        shares: Callable[[int], list[Share]],
        blocks: Callable[[list[int]], list[int]],
        stats: Stats,
        timeout_s: float,
        block_size: int,
        whole_blocks: bool,
    ) -> None:
        """`shares`: of a producer of so many ranks. `blocks`: the endpoint's blocks of the
        scheduler's; `block_size` is theirs. `whole_blocks`: no part of one can move by itself."""
        self._endpoint = endpoint
        self._groups = groups
        self._shares = shares
        self._blocks = blocks
        self._stats = stats
        self._timeout_s = timeout_s
        self._block_size = block_size
        self._whole_blocks = whole_blocks
        self._requests: dict[str, Request] = {}
        self._unwanted: dict[str, list[tuple[str, int]]] = {}
        """By the key of a link that is not READY: leases, and how many read each, that are to be
        let go as soon as it is."""
        self.links: Links | None = None
        """Set by the owner, whom it tells `on_ready` and `on_gone` of."""
        self.ended: list[Request] = []
        """Loads that ended since the owner looked."""

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def is_busy(self) -> bool:
        """Whether tickets are under way."""
        return any(p.tickets for request in self._requests.values() for p in request.parts)

    # ---- what the scheduler decides

    def claim(self, claim: Claim) -> None:
        try:
            self._check_once(claim)
            ranks = claim.source.ranks
            shares = self._shares(len(ranks))
            parts = [Part(share, ranks[share.rank].incarnation) for share in shares]
            request = Request(claim, parts)
            self._requests[claim.request_id] = request
            for part in parts:
                part.link = self._links.dial(ranks[part.share.rank].address)
                if part.link.state is LinkState.READY:
                    self._send_claim(request, part)
        except KvxferError as error:
            self._requests.setdefault(claim.request_id, Request(claim, []))
            self._fail(self._requests[claim.request_id], str(error))

    def load(self, load: Load) -> None:
        request = self._requests.get(load.request_id)
        if request is None:  # its claim came before this service was started
            nothing = Claim(load.request_id, Source("", "", "", ()))
            request = Request(nothing, [], error="it was never claimed here")
            self._requests[load.request_id] = request
        request.load = load
        for part in request.parts:
            if part.state is PartState.HELD and not request.error:
                self._read(request, part)
        self._settle(request)

    def drop(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.is_dropped = True
            self._fail(request, "the request has ended")

    # ---- what producers say

    def on_ready(self, link: Link) -> None:
        for lease_id, num_readers in self._unwanted.pop(link.key, []):
            self._let_go(link, lease_id, num_readers)
        for request, part in self._parts_of(link):
            if part.state is PartState.NEW:
                self._send_claim(request, part)

    def on_gone(self, link: Link, reason: str) -> None:
        self._unwanted.pop(link.key, None)
        for request, part in self._parts_of(link):
            if part.state not in ENDED:
                part.link = None
                self._fail(request, f"producer {link.name}: {reason}")

    def hear(self, link: Link, message: Message) -> None:
        if not isinstance(message, Ready | Confirmed | Failed):
            self._links.lose(link, f"it said {type(message).__name__}, a consumer's word")
            return
        for request, part in self._parts_of(link):
            if request.claim.source.lease_id != message.lease_id:
                continue
            if isinstance(message, Failed):
                if part.state is not PartState.READING:
                    part.become(PartState.FAILED)
                self._fail(request, f"producer {link.name}: {message.reason}")
            elif isinstance(message, Ready) and part.state is PartState.CLAIMED:
                part.ready = message
                part.become(PartState.HELD)
                if request.load is not None:
                    self._read(request, part)
            elif isinstance(message, Confirmed) and part.state is PartState.TAKEN:
                part.become(PartState.DONE)
            self._settle(request)

    # ---- time

    def poll(self) -> None:
        """Look at our tickets; the endpoint was polled just now."""
        for request in list(self._requests.values()):
            for part in request.parts:
                if part.tickets and all(ticket.done for ticket in part.tickets):
                    self._on_read(request, part)

    def tick(self, now_s: float) -> None:
        for request in list(self._requests.values()):
            for part in request.parts:
                if part.state in TIMED and now_s - part.since_s > self._timeout_s:
                    where = part.link.name if part.link else "the producer"
                    self._fail(request, f"{where} has not answered in {self._timeout_s:g} s")

    def close(self, reason: str) -> None:
        for request in list(self._requests.values()):
            self._fail(request, reason)

    # ---- parts

    @property
    def _links(self) -> Links:
        assert self.links is not None
        return self.links

    def _check_once(self, claim: Claim) -> None:
        """A lease is good once: answers to two claims of it could not be told apart."""
        lease_id = claim.source.lease_id
        for request in self._requests.values():
            if request.claim.source.lease_id == lease_id:
                other = request.claim.request_id
                raise TransferError(f"its KV has been claimed for request {other} already")

    def _parts_of(self, link: Link) -> list[tuple[Request, Part]]:
        return [
            (request, part)
            for request in self._requests.values()
            for part in request.parts
            if part.link is link
        ]

    def _send_claim(self, request: Request, part: Part) -> None:
        assert part.link is not None and part.link.facts is not None
        if part.link.facts.incarnation != part.incarnation:
            part.become(PartState.FAILED)
            self._fail(request, f"producer {part.link.name} has started anew since")
            return
        part.become(PartState.CLAIMED)
        lease_id = request.claim.source.lease_id
        self._links.send(part.link, ClaimMessage(lease_id, part.share.num_readers))

    def _read(self, request: Request, part: Part) -> None:
        """Start the transfers of a part that is HELD."""
        part.started_s = time.monotonic()
        part.become(PartState.READING)
        try:
            if part.share.heads:
                self._pull(request, part)
        except KvxferError as error:
            self._fail(request, str(error))
        if not part.tickets:
            self._on_read(request, part)

    def _pull(self, request: Request, part: Part) -> None:
        load, ready, link = request.load, part.ready, part.link
        assert load is not None and ready is not None and link is not None and link.facts
        if ready.num_tokens < load.end or len(ready.blocks) != len(load.blocks):
            text = f"{len(ready.blocks)} groups of {ready.num_tokens} tokens"
            raise PlanError(f"producer {link.name} has {text}, {load.end} are wanted")
        sizes = link.facts.block_size, self._block_size
        end = -(-load.end // sizes[1]) * sizes[1] if self._whole_blocks else load.end
        for group, theirs, ours in zip(self._groups, ready.blocks, load.blocks, strict=True):
            tokens = range(load.start, end)
            reading = reading_of(theirs, self._blocks(ours), sizes, tokens, group.window)
            if reading is not None:
                ticket = self._endpoint.pull(
                    link.facts.name,
                    reading.src_blocks,
                    reading.dst_blocks,
                    reading.tokens,
                    range(len(group.names)),
                    heads=part.share.heads,
                    lane=link.lane,
                )
                part.tickets.append(ticket)

    def _on_read(self, request: Request, part: Part) -> None:
        """Nothing of ours is under way in this part any more."""
        tickets, part.tickets = part.tickets, []
        for ticket in tickets:
            self._stats.ended(ticket, time.monotonic() - part.started_s)
            if ticket.error is not None:
                request.error = request.error or f"transfer by {ticket.lane}: {ticket.error}"
        if request.error:
            self._fail(request, request.error)
        elif part.link is not None:
            part.become(PartState.TAKEN)
            self._links.send(part.link, Taken(request.claim.source.lease_id))

    def _fail(self, request: Request, reason: str) -> None:
        """No part of it will be used: end those that nobody writes for."""
        if not request.error:
            request.error = reason
        for part in request.parts:
            if part.state in ENDED or part.tickets:
                continue
            state, link = part.state, part.link
            part.become(PartState.FAILED)
            if link is None:
                continue
            lease_id = request.claim.source.lease_id
            if state is not PartState.NEW:
                self._links.send(link, Abort(lease_id))
            elif link.state is LinkState.READY:
                self._let_go(link, lease_id, part.share.num_readers)
            else:
                unwanted = self._unwanted.setdefault(link.key, [])
                unwanted.append((lease_id, part.share.num_readers))
        self._settle(request)

    def _let_go(self, link: Link, lease_id: str, num_readers: int) -> None:
        """Of what was not claimed yet."""
        self._links.send(link, ClaimMessage(lease_id, num_readers))
        self._links.send(link, Abort(lease_id))

    def _settle(self, request: Request) -> None:
        """Forget what has ended; the owner is told of each load, once."""
        request_id = request.claim.request_id
        if self._requests.get(request_id) is not request or not request.has_ended:
            return
        if request.load is not None:
            del self._requests[request_id]
            self.ended.append(request)
        elif request.is_dropped:
            del self._requests[request_id]
