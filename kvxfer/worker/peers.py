"""The workers of the other role, and routers: who is there, and what they may be sent.

States: see `kvxfer.control.session`; how peers get to know one another: `worker.greeting`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvxfer.config import WorkerOptions
from kvxfer.control.channel import Channel
from kvxfer.control.facts import RankFacts, WorkerFacts
from kvxfer.control.messages import Goodbye, Message, RegionsAck
from kvxfer.control.resync_messages import HelloWanted, RegionsAt
from kvxfer.control.session import Peer, PeerState
from kvxfer.errors import ControlError, KvxferError, WireError, WorkerDied
from kvxfer.transfer.lane_costs import LaneCosts
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.regions import RegionSet
from kvxfer.worker.greeting import Greeting
from kvxfer.worker.holders import Holders
from kvxfer.worker.liveness import Liveness
from kvxfer.worker.region_exchange import RegionExchange
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
        self.facts = facts
        self.where: Callable[[], RegionsAt] = lambda: RegionsAt(0, 0)
        """What is registered here."""
        self._liveness = Liveness(channel, facts, options.peer_timeout_s)
        self._transfer_timeout_s = options.transfer_timeout_s
        self._tests_lanes = options.lane_test
        self._exit_on_loss = options.on_peer_loss == "exit"
        self._peers: dict[str, Peer] = {}
        self.was_ready = False
        """Whether KV could ever flow to or from anybody."""
        self.has_left = False
        """Whether this worker only waits for answers to its last words."""
        self.may_find_others = False
        """Whether routers tell us whom to dial."""
        self.on_met: Callable[[Peer], None] = lambda peer: None
        """Where both sides try lanes out: one is to be chosen, and `settle` to be called."""
        self.on_ready: Callable[[Peer], None] = lambda peer: None
        self.on_lost: Callable[[Peer, str], None] = lambda peer, reason: None
        self.holders = Holders()
        self.exchange = RegionExchange(self)
        self.greeting = Greeting(self)
        self.handlers: dict[type, Callable[[str, Any], None]] = {
            Goodbye: self._on_goodbye,
            **self.greeting.handlers,
            **self.exchange.handlers,
        }
        self.on_revoked: Callable[[Peer, list[int]], None] = lambda peer, lowest: None
        """A peer revoked regions, `lowest` their first block in each group: what touches them, or
        lies above, fails."""
        self.on_fenced: Callable[[str], None] = lambda worker_id: None
        """A worker of this id came back as a new process, or left with nothing under way: what was
        there writes no more."""

    def ready(self) -> list[Peer]:
        """Workers (not routers) that KV may flow to or from."""
        return [p for p in self._peers.values() if p.state is PeerState.READY and p.facts]

    def get(self, key: str) -> Peer | None:
        return self._peers.get(key)

    def all(self) -> list[Peer]:
        return list(self._peers.values())

    def dialled(self) -> list[Peer]:
        """Those whom we dialled, in whatever state: that they stay known is what lets us go on."""
        return [peer for peer in self._peers.values() if peer.key.startswith("out:")]

    def add(self, peer: Peer) -> None:
        self._peers[peer.key] = peer

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

    def require_router(self, key: str) -> Peer:
        """The router behind `key`, which greeted us. Raises WireError for anybody else."""
        peer = self._peers.get(key)
        if peer is None or peer.state is not PeerState.READY or peer.facts is not None:
            raise WireError(f"{key} is no router that we know")
        return peer

    def check_dial(self, field: str, address: str) -> None:
        """Raise UsageError where `dial` would refuse `address`."""
        self._channel.check_dial(field, address)

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

    def informed(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.knows_us]

    def epochs_in_use(self) -> set[int]:
        """Of ours: whose agents somebody may use, here or lost."""
        return self.holders.epochs().union(peer.told_epoch for peer in self.informed())

    @property
    def is_alone(self) -> bool:
        """Whether nobody is met."""
        return not any(peer.is_met for peer in self._peers.values())

    @property
    def is_settled(self) -> bool:
        """Whether nobody is being greeted, and no lanes are being tried."""
        between = (PeerState.GREETING, PeerState.MET)
        return not any(p.state in between and p.facts for p in self._peers.values())

    # --- messages -----------------------------------------------------------------------------

    def answer_stranger(self, key: str, message: Message) -> None:
        """To somebody that we do not know: no peer is lost if it does not get there."""
        try:
            self._channel.send(key, message)
        except ControlError as error:
            logger.debug("no answer to %s: %s", key, error)

    def heard(self, key: str) -> None:
        if key in self._peers:
            self._peers[key].last_seen_s = time.monotonic()

    def _on_goodbye(self, key: str, goodbye: Goodbye) -> None:
        peer = self._peers.get(key)
        if goodbye.is_quiet:
            self.answer_stranger(key, Goodbye("heard", is_quiet=False))
        self.lose(key, f"it left: {goodbye.reason}", left=True)
        if peer is not None and peer.facts is not None and goodbye.is_quiet:
            self.holders.left(peer)
            self.on_fenced(peer.name)

    def forget(self, key: str, reason: str) -> None:
        """Leave one that we dialled, with whom nothing is under way: it is told so, and greeted no
        more."""
        peer = self._peers[key]
        if peer.is_met:
            self.answer_stranger(key, Goodbye(reason, is_quiet=True))
        self.lose(key, reason, left=True)
        self.holders.left(peer)
        del self._peers[key]
        self._channel.hang_up(key)

    # --- life cycle ---------------------------------------------------------------------------

    def load(self, peer: Peer, answer: Callable[[], Message] | None) -> None:
        """Give all of the peer's regions to the connector; then it is ready."""
        assert peer.facts is not None
        at = peer.epoch, peer.regions.generation

        def loaded() -> None:
            newly = not peer.is_met
            if newly:
                peer.state = PeerState.MET
                peer.met_s = time.monotonic()
            peer.last_seen_s = time.monotonic()
            if answer is not None and newly:
                peer.told_epoch = self.where().epoch
            if answer is not None and not self.send(peer.key, answer()):
                return
            peer.loaded = max(peer.loaded, at)
            if not self.send(peer.key, RegionsAck(peer.loaded[1])):
                return
            if newly and peer.facts and peer.facts.tests_lanes and self._tests_lanes:
                self.on_met(peer)
            elif newly and peer.lane:
                self.settle(peer, peer.lane, 0.0)

        self.connect(peer, peer.facts.ranks, loaded)

    def settle(self, peer: Peer, lane: Lane, gbps: float, costs: LaneCosts | None = None) -> None:
        """KV flows between `peer` and us by `lane` from now on, or by others of its direction."""
        if not peer.is_met:
            return
        peer.lane, peer.lane_gbps, peer.lane_costs = lane, gbps, dict(costs or {})
        if peer.state is PeerState.MET:
            peer.state = PeerState.READY
            peer.num_hellos = 0
            peer.refusal = None
            self.was_ready = True
            logger.info("peer %s is ready, lane: %s", peer.name, lane)
            self.on_ready(peer)

    def connect(
        self, peer: Peer, ranks: Ranks, loaded: Callable[[], object], renew: bool = False
    ) -> None:
        """Have the connectors learn it; `loaded` unless it is lost before."""
        key, session = peer.key, peer.session

        def is_on() -> bool:
            return self._peers.get(key) is peer and peer.session == session

        def done(reached: frozenset[str]) -> None:
            if is_on():
                peer.reached = reached
                loaded()

        def failed(error: KvxferError) -> None:
            if is_on():
                self.lose(key, str(error))

        learn = self._transfer.renew if renew else self._transfer.connect
        learn(key, ranks, done, failed)

    def lose(self, key: str, reason: str, left: bool = False) -> None:
        """Fence a peer off. Its state is GONE when `on_lost` is called.

        Raises WorkerDied where the options say that a worker without its peer shall end, unless
        the peer `left` on purpose.
        """
        peer = self._peers.get(key)
        if peer is None or peer.state is PeerState.GONE:
            return
        self.holders.lost(peer, self.where().epoch)
        if peer.is_met:
            peer.hello_sent_s = 0.0  # greet again at once; after a failed greeting, in a while
        peer.state = PeerState.GONE
        peer.acked_generation, peer.is_draining = 0, False
        peer.loaded, peer.epoch, peer.regions = (0, 0), 0, RegionSet()
        peer.session += 1
        if peer.facts is not None:
            level = logging.INFO if left else logging.WARNING
            logger.log(level, "peer %s is lost: %s", peer.name, reason)
            self._transfer.disconnect(key, lambda error: logger.warning("%s", error))
        if not key.startswith("out:"):
            del self._peers[key]
            if peer.facts is not None and not left:  # should it live, it need not wait for silence
                self.answer_stranger(key, HelloWanted())
        self.on_lost(peer, reason)
        if self._exit_on_loss and peer.facts is not None and not left:
            raise WorkerDied(f"peer {peer.name} is lost: {reason}")

    def tick(self) -> None:
        for key in self._transfer.progress.stalled(self._transfer_timeout_s):
            self.lose(key, f"no transfer made progress for {self._transfer_timeout_s:g} s")
        if not self.has_left:
            self._liveness.tick(self._peers.values(), self.where(), self.send, self.lose)

    def farewell(self, reason: str, is_quiet: bool = False) -> None:
        """Tell everybody that this worker leaves; `is_quiet` as in Goodbye, and then nobody is met
        any more."""
        self.has_left = is_quiet
        for peer in self._peers.values():
            if peer.is_met:
                try:
                    self._channel.send(peer.key, Goodbye(reason, is_quiet))
                except ControlError as error:
                    logger.debug("no goodbye to %s: %s", peer.name, error)
