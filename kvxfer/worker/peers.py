"""Handshake, liveness and region exchange with the workers of the other role, and with routers.

The one who dials says Hello, the other answers Welcome once its connector has loaded the dialler's
regions, or Reject with the field that differs. States: see `kvxfer.control.session`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvxfer.config import WorkerOptions
from kvxfer.control.cache_messages import RegionsRevoke, RegionsRevoked
from kvxfer.control.channel import Channel
from kvxfer.control.facts import RankFacts, WorkerFacts
from kvxfer.control.messages import (
    WIRE_VERSION,
    Goodbye,
    Hello,
    Message,
    RegionsAck,
    RegionsUpdate,
    Reject,
    Welcome,
)
from kvxfer.control.session import Peer, PeerState, agree
from kvxfer.errors import ControlError, HandshakeRejected, KvxferError, WireError, WorkerDied
from kvxfer.transfer.lane_costs import LaneCosts
from kvxfer.transfer.lanes import Lane
from kvxfer.worker.holders import Holders
from kvxfer.worker.liveness import Liveness
from kvxfer.worker.transfer_thread import TransferThread

logger = logging.getLogger(__name__)

Ranks = Sequence[RankFacts]


class PeerTable:
    """All peers of one worker. Control thread only."""

    def __init__(
        self,
        options: WorkerOptions,
        channel: Channel,
        transfer: TransferThread,
        facts: Callable[[int], WorkerFacts],
    ) -> None:
        """`facts` are ours, with invitations for so many ranks of a peer."""
        self._channel = channel
        self._transfer = transfer
        self._facts = facts
        self._liveness = Liveness(channel, facts, options.peer_timeout_s)
        self._tests_lanes = options.lane_test
        self._exit_on_loss = options.on_peer_loss == "exit"
        self._peers: dict[str, Peer] = {}
        self.on_met: Callable[[Peer], None] = lambda peer: None
        """Where both sides try lanes out: one is to be chosen, and `settle` to be called."""
        self.on_ready: Callable[[Peer], None] = lambda peer: None
        self.on_lost: Callable[[Peer, str], None] = lambda peer, reason: None
        self.holders = Holders()
        self.on_revoked: Callable[[Peer, list[int]], None] = lambda peer, lowest: None
        """A peer revoked regions, `lowest` their first block in each group: what touches them, or
        lies above, fails."""
        self.on_fenced: Callable[[str], None] = lambda worker_id: None
        """A worker of this id came back as a new process: the old one can write no more."""

    def ready(self) -> list[Peer]:
        """Workers (not routers) that KV may flow to or from."""
        return [p for p in self._peers.values() if p.state is PeerState.READY and p.facts]

    def get(self, key: str) -> Peer | None:
        return self._peers.get(key)

    def require(self, key: str) -> Peer:
        """The ready worker behind `key`. Raises WireError for anybody else."""
        peer = self._peers.get(key)
        if peer is None or peer.state is not PeerState.READY or peer.facts is None:
            raise WireError(f"{key} is no ready worker")
        return peer

    def require_met(self, key: str) -> Peer:
        """As `require`, but lanes may not have been tried yet."""
        peer = self._peers.get(key)
        if peer is None or not peer.is_met or peer.facts is None:
            raise WireError(f"{key} is no worker that we know")
        return peer

    def dial(self, address: str) -> None:
        key = self._channel.dial(address)
        self._peers[key] = Peer(key, time.monotonic())
        logger.info("dialling %s until it answers", address)

    def send(self, key: str, message: Message) -> bool:
        """False when the peer is gone: it is then lost."""
        try:
            self._channel.send(key, message)
        except ControlError as error:
            self.lose(key, str(error))
            return False
        return True

    def laggards(self, generation: int) -> list[str]:
        met = [p for p in self._peers.values() if p.is_met and p.facts]
        return [p.key for p in met if p.acked_generation < generation]

    def publish(self, update: RegionsUpdate) -> None:
        for peer in self._informed():
            self.send(peer.key, update)

    def revoke(self, revoke: RegionsRevoke) -> None:
        self.holders.owing.clear()
        for peer in self._informed():
            self.holders.told(peer)
            self.send(peer.key, revoke)

    def _informed(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.knows_us]

    # --- messages -----------------------------------------------------------------------------

    def heard(self, key: str) -> None:
        if key in self._peers:
            self._peers[key].last_seen_s = time.monotonic()

    def on_hello(self, key: str, hello: Hello) -> None:
        if hello.wire_version != WIRE_VERSION:
            self._reject(key, HandshakeRejected("wire_version", WIRE_VERSION, hello.wire_version))
        elif hello.facts is None:
            self._peers[key] = Peer(key, time.monotonic(), PeerState.READY)
            self.send(key, Welcome(WIRE_VERSION, self._facts(0), ""))
        else:
            self._greet(key, hello.facts)

    def _greet(self, key: str, facts: WorkerFacts) -> None:
        """Idempotent: a Hello that is repeated is answered again."""
        peer = self._peers.get(key) or Peer(key, time.monotonic())
        try:
            peer.learn(facts, agree(self._facts(0), facts))
        except KvxferError as error:
            self._reject(key, error)
            return
        self._replace_older(peer)
        self.holders.met(facts)
        self._peers[key] = peer
        invited = len(facts.ranks)
        self._load(peer, lambda: Welcome(WIRE_VERSION, self._facts(invited), str(peer.lane)))

    def _replace_older(self, peer: Peer) -> None:
        for old in list(self._peers.values()):
            if old.key != peer.key and old.facts and peer.facts and old.name == peer.name:
                self.lose(old.key, "a new process of the same worker said Hello")
                self.on_fenced(peer.name)

    def _reject(self, key: str, error: KvxferError) -> None:
        logger.warning("refused %s: %s", key, error)
        if isinstance(error, HandshakeRejected):
            reject = Reject(error.field, str(error.theirs), str(error.ours))
        else:
            reject = Reject("facts", "", str(error))
        self._channel.send(key, reject)

    def on_welcome(self, key: str, welcome: Welcome) -> None:
        peer = self._peers.get(key)
        if peer is None or not key.startswith("out:"):
            raise WireError(f"Welcome from {key}, whom nobody greeted")
        if peer.is_met:
            return  # the answer to a Hello that was repeated
        if welcome.wire_version != WIRE_VERSION:
            raise HandshakeRejected("wire_version", WIRE_VERSION, welcome.wire_version)
        lanes = agree(self._facts(0), welcome.facts)
        if welcome.lane != str(lanes[0]):
            raise HandshakeRejected("lane", lanes[0], welcome.lane)
        restarted = peer.facts and peer.facts.incarnation != welcome.facts.incarnation
        peer.learn(welcome.facts, lanes)
        self.holders.met(welcome.facts)
        if restarted:
            self.on_fenced(peer.name)
        self._load(peer, None)

    def on_reject(self, key: str, reject: Reject) -> None:
        """Whom we dialled will not have us: nothing that waiting could mend."""
        if key.startswith("out:"):
            raise HandshakeRejected(reject.field, reject.ours, reject.theirs)
        raise WireError(f"Reject from {key}, whom nobody greeted")

    def on_goodbye(self, key: str, goodbye: Goodbye) -> None:
        self.lose(key, f"it left: {goodbye.reason}", left=True)

    def on_regions_update(self, key: str, update: RegionsUpdate) -> None:
        peer = self._peers.get(key)
        if peer is None or peer.facts is None or peer.state is PeerState.GONE:
            raise WireError(f"RegionsUpdate from {key}, who said no Hello")
        ranks = peer.described(update.descriptions)
        peer.grow(update)
        self._connect(peer, ranks, lambda: self._ack(peer, update.generation))

    def on_regions_ack(self, key: str, ack: RegionsAck) -> None:
        peer = self._peers.get(key)
        if peer is not None:
            peer.acked_generation = max(peer.acked_generation, ack.generation)

    def on_regions_revoke(self, key: str, revoke: RegionsRevoke) -> None:
        peer = self._peers.get(key)
        if peer is None or peer.facts is None or peer.state is PeerState.GONE:
            raise WireError(f"RegionsRevoke from {key}, who said no Hello")
        ranks = peer.described(revoke.descriptions)
        self.on_revoked(peer, peer.drop(revoke))
        revoked = RegionsRevoked(revoke.epoch)
        self._connect(peer, ranks, lambda: self.send(key, revoked), renew=True)

    # --- life cycle ---------------------------------------------------------------------------

    def _load(self, peer: Peer, answer: Callable[[], Message] | None) -> None:
        """Give all of the peer's regions to the connector; then it is ready."""
        assert peer.facts is not None
        generation = peer.facts.generation

        def loaded() -> None:
            newly = not peer.is_met
            if newly:
                peer.state = PeerState.MET
                peer.met_s = time.monotonic()
            peer.last_seen_s = time.monotonic()
            if answer is not None and not self.send(peer.key, answer()):
                return
            self._ack(peer, generation)
            if newly and peer.facts and peer.facts.tests_lanes and self._tests_lanes:
                self.on_met(peer)
            elif newly and peer.lane:
                self.settle(peer, peer.lane, 0.0)

        self._connect(peer, peer.facts.ranks, loaded)

    def settle(self, peer: Peer, lane: Lane, gbps: float, costs: LaneCosts | None = None) -> None:
        """KV flows between `peer` and us by `lane` from now on, or by others of its direction."""
        if not peer.is_met:
            return
        peer.lane, peer.lane_gbps, peer.lane_costs = lane, gbps, dict(costs or {})
        if peer.state is PeerState.MET:
            peer.state = PeerState.READY
            logger.info("peer %s is ready, lane: %s", peer.name, lane)
            self.on_ready(peer)

    def _connect(
        self, peer: Peer, ranks: Ranks, loaded: Callable[[], object], renew: bool = False
    ) -> None:
        key = peer.key

        def done(reached: frozenset[str]) -> None:
            if self._peers.get(key) is peer and peer.state is not PeerState.GONE:
                peer.reached = reached
                loaded()

        def failed(error: KvxferError) -> None:
            self.lose(key, str(error))

        learn = self._transfer.renew if renew else self._transfer.connect
        learn(key, ranks, done, failed)

    def _ack(self, peer: Peer, generation: int) -> None:
        self.send(peer.key, RegionsAck(generation))

    def lose(self, key: str, reason: str, left: bool = False) -> None:
        """Fence a peer off. Its state is GONE when `on_lost` is called.

        Raises WorkerDied where the options say that a worker without its peer shall end, unless
        the peer `left` on purpose.
        """
        peer = self._peers.get(key)
        if peer is None or peer.state is PeerState.GONE:
            return
        self.holders.lost(peer)
        if peer.is_met:
            peer.hello_sent_s = 0.0  # greet again at once; after a failed greeting, in a while
        peer.state = PeerState.GONE
        peer.acked_generation = 0
        if peer.facts is not None:
            logger.warning("peer %s is lost: %s", peer.name, reason)
            self._transfer.disconnect(key, lambda error: logger.warning("%s", error))
        if not key.startswith("out:"):
            del self._peers[key]
        self.on_lost(peer, reason)
        if self._exit_on_loss and peer.facts is not None and not left:
            raise WorkerDied(f"peer {peer.name} is lost: {reason}")

    def tick(self) -> None:
        self._liveness.tick(self._peers.values(), self.send, self.lose)

    def farewell(self, reason: str) -> None:
        """Tell everybody that this worker leaves."""
        for peer in self._peers.values():
            if peer.is_met:
                try:
                    self._channel.send(peer.key, Goodbye(reason))
                except ControlError as error:
                    logger.debug("no goodbye to %s: %s", peer.name, error)
