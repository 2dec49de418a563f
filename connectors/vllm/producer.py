"""A producer's rank towards the consumers that dial it. Service thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from connectors.vllm.handover import Offer
from connectors.vllm.leases import Leases
from connectors.vllm.messages import (
    WIRE_VERSION,
    Abort,
    Claim,
    Confirmed,
    Facts,
    Failed,
    Goodbye,
    Heartbeat,
    Hello,
    Leave,
    Message,
    Ready,
    Reject,
    Taken,
    Unknown,
    Welcome,
    check_same,
)
from connectors.vllm.options import Options
from kvxfer.errors import HandshakeRejected, KvxferError
from kvxfer.transfer.endpoint import Endpoint

logger = logging.getLogger(__name__)

Send = Callable[[str, Message], bool]
"""To a peer, by the channel's key; False where it is gone."""
Blocks = Callable[[list[int]], list[int]]


@dataclass(slots=True)
class _Reader:
    """A consumer's rank that has greeted us."""

    name: str
    seen_s: float


class Producer:
    def __init__(
        self, options: Options, facts: Facts, endpoint: Endpoint, send: Send, blocks: Blocks
    ) -> None:
        """`blocks`: the endpoint's blocks of the scheduler's."""
        self._timeout_s = options.peer_timeout_s
        self._facts = facts
        self._endpoint = endpoint
        self._send = send
        self._blocks = blocks
        self._readers: dict[str, _Reader] = {}
        """By the channel's key."""
        self._is_leaving = False
        self.silent: set[str] = set()
        """Those that were lost and have not said that they let go: they may still read."""
        self.leases = Leases(options.lease_timeout_s)

    @property
    def is_busy(self) -> bool:
        """Whether somebody may be reading."""
        return self.leases.num_readers > 0

    def offer(self, offer: Offer) -> None:
        for peer in self.leases.offer(offer, time.monotonic()):
            self._send(peer, self._ready(offer))

    def hear(self, peer: str, message: Message) -> None:
        if isinstance(message, Hello):
            self._on_hello(peer, message)
            return
        reader = self._readers.get(peer)
        if reader is None:  # of an earlier life of ours, or lost: it is to greet us again
            if not isinstance(message, Goodbye):
                self._send(peer, Unknown())
            return
        reader.seen_s = time.monotonic()
        if isinstance(message, Claim):
            self._on_claim(peer, message)
        elif isinstance(message, Taken):
            self._on_taken(peer, message)
        elif isinstance(message, Abort):
            self.leases.done(peer, message.lease_id)
        elif isinstance(message, Goodbye):
            self._on_goodbye(peer, message)
        elif not isinstance(message, Heartbeat):
            self._lose(peer, f"it said {type(message).__name__}, which is a producer's word")

    def tick(self, now_s: float, is_beat: bool) -> None:
        for peer, reader in list(self._readers.items()):
            if now_s - reader.seen_s > self._timeout_s:
                self._lose(peer, f"nothing heard for {self._timeout_s:g} s")
            elif is_beat:
                self._send(peer, Heartbeat())
        for peer, lease_id in self.leases.expire(now_s):
            self._send(peer, Failed(lease_id, "there is no such lease"))

    def leave(self, reason: str) -> None:
        """The memory is to go: no lease holds any more, and who may reach it is asked to let go."""
        self.leases.break_all()
        self._is_leaving = True
        for peer in self._readers:
            self._send(peer, Leave(reason))

    @property
    def has_readers(self) -> bool:
        return bool(self._readers)

    def _on_hello(self, peer: str, hello: Hello) -> None:
        if peer in self._readers:
            self._lose(peer, "it has greeted us again")
        if self._is_leaving:
            return
        try:
            if hello.wire_version != WIRE_VERSION:
                raise HandshakeRejected("wire_version", WIRE_VERSION, hello.wire_version)
            check_same(self._facts, hello.facts)
        except HandshakeRejected as error:
            logger.warning("%s: %s", hello.facts.name, error)
            self._send(peer, Reject(error.field, str(error.ours), str(error.theirs)))
            return
        self._readers[peer] = _Reader(hello.facts.name, time.monotonic())
        self.silent.discard(hello.facts.name)
        told = self._endpoint.describe(hello.facts.name)
        if not self._send(peer, Welcome(WIRE_VERSION, self._facts, told)):
            self._lose(peer, "it left before it was welcomed")

    def _on_claim(self, peer: str, claim: Claim) -> None:
        now_s = time.monotonic()
        offer = self.leases.claim(peer, claim.lease_id, claim.num_readers, now_s)
        if offer is not None:
            self._send(peer, self._ready(offer))
        elif not self.leases.waits(peer, claim.lease_id):
            self._send(
                peer, Failed(claim.lease_id, "it was claimed before, or nobody may any more")
            )

    def _on_taken(self, peer: str, taken: Taken) -> None:
        if self.leases.done(peer, taken.lease_id):
            self._send(peer, Confirmed(taken.lease_id))
        else:
            self._send(peer, Failed(taken.lease_id, "the lease was broken"))

    def _ready(self, offer: Offer) -> Ready:
        blocks = [self._blocks(group) for group in offer.blocks]
        return Ready(offer.lease_id, offer.num_tokens, blocks)

    def _on_goodbye(self, peer: str, goodbye: Goodbye) -> None:
        reader = self._readers.pop(peer)
        broken = self.leases.lose(peer)
        try:
            if goodbye.acknowledgement:
                self._endpoint.acknowledge(reader.name, goodbye.acknowledgement)
            else:
                self._endpoint.fence(reader.name)
        except KvxferError as error:
            logger.warning("consumer %s: %s", reader.name, error)
            self.silent.add(reader.name)
        logger.info("consumer %s has left; %d leases broken", reader.name, broken)

    def _lose(self, peer: str, reason: str) -> None:
        """What it still reads it reads in vain; the memory stays where it is, as vLLM's does."""
        reader = self._readers.pop(peer)
        broken = self.leases.lose(peer)
        self.silent.add(reader.name)
        log = logger.warning if broken else logger.info
        log("consumer %s is gone: %s; %d leases broken", reader.name, reason, broken)
