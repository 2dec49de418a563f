"""Telling peers what is registered here, and learning what is registered there.

Nothing relies on a message that arrives: updates and revocations are repeated until they are
acknowledged, known ones are acknowledged again, and whoever sees a gap, in them or behind what a
heartbeat tells, asks for all of it. States: see `kvxfer.control.session`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvxfer.control.cache_messages import RegionsRevoke, RegionsRevoked
from kvxfer.control.messages import Heartbeat, RegionsAck, RegionsUpdate
from kvxfer.control.resync_messages import HelloWanted, RegionsAt, RegionsQuery, RegionsState
from kvxfer.control.session import Peer, PeerState
from kvxfer.errors import WireError

if TYPE_CHECKING:
    from kvxfer.worker.peers import PeerTable

ASK_PAUSE_S = 0.2
"""Between two questions of the same kind: what follows a gap must not multiply them."""


class RegionExchange:
    """Control thread only."""

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        self.handlers: dict[type, Callable[[str, Any], None]] = {
            Heartbeat: self._on_heartbeat,
            RegionsAt: self._on_regions_at,
            RegionsUpdate: self._on_update,
            RegionsAck: self._on_ack,
            RegionsRevoke: self._on_revoke,
            RegionsQuery: self._on_query,
            RegionsState: self._on_state,
        }

    # --- ours -----------------------------------------------------------------------------------

    def publish(self, update: RegionsUpdate) -> None:
        """To all that have not acknowledged it."""
        for peer in self._peers.informed():
            if peer.acked_generation < update.generation:
                self._peers.send(peer.key, update)

    def revoke(self, revoke: RegionsRevoke) -> None:
        holders = self._peers.holders
        holders.owing.clear()
        for peer in self._peers.informed():
            holders.told(peer)
            self._peers.send(peer.key, revoke)

    def repeat(self, revoke: RegionsRevoke) -> None:
        """To all that have not acknowledged it."""
        for key in list(self._peers.holders.owing):
            self._peers.send(key, revoke)

    def _on_ack(self, key: str, ack: RegionsAck) -> None:
        peer = self._peers.get(key)
        if peer is not None:
            peer.acked_generation = max(peer.acked_generation, ack.generation)
            if peer.is_met:  # what it loads before is of an earlier session, and not said again
                self._peers.holders.renewed(peer)

    def _on_query(self, key: str, query: RegionsQuery) -> None:
        peer = self._peers.get(key)
        if peer is None or not peer.knows_us:
            raise WireError(f"RegionsQuery from {key}, who is told of nothing")
        facts = self._peers.facts(0)
        told = [rank.description for rank in facts.ranks]
        state = RegionsState(facts.epoch, facts.generation, facts.regions, told)
        self._peers.send(key, state)

    # --- theirs ---------------------------------------------------------------------------------

    def _known(self, key: str, name: str) -> Peer:
        peer = self._peers.get(key)
        if peer is None or peer.facts is None or peer.state is PeerState.GONE:
            raise WireError(f"{name} from {key}, who said no Hello")
        return peer

    def _on_heartbeat(self, key: str, beat: Heartbeat) -> None:
        if self._peers.get(key) is None:
            self._peers.answer_stranger(key, HelloWanted())

    def _on_regions_at(self, key: str, at: RegionsAt) -> None:
        peer = self._peers.get(key)
        if peer and peer.is_met and peer.facts and not peer.knows(at.epoch, at.generation):
            self._ask(peer)

    def _ask(self, peer: Peer) -> None:
        now = time.monotonic()
        if now - peer.asked_s >= ASK_PAUSE_S:
            peer.asked_s = now
            self._peers.send(peer.key, RegionsQuery())

    def _on_update(self, key: str, update: RegionsUpdate) -> None:
        peer = self._known(key, "RegionsUpdate")
        if peer.knows(update.epoch, update.generation):
            self._acknowledge(peer)
        elif not peer.is_next(update):
            self._ask(peer)
        else:
            ranks = peer.described(update.descriptions)
            peer.grow(update)
            self._load(peer, ranks)

    def _on_revoke(self, key: str, revoke: RegionsRevoke) -> None:
        peer = self._known(key, "RegionsRevoke")
        if revoke.epoch <= peer.epoch:
            self._acknowledge(peer)
        elif not peer.can_drop(revoke):
            self._ask(peer)
        else:
            ranks = peer.described(revoke.descriptions)
            self._peers.on_revoked(peer, peer.drop(revoke))
            self._load(peer, ranks, renew=True)

    def _on_state(self, key: str, state: RegionsState) -> None:
        """Where revocations were missed, any region may have gone and come back meanwhile."""
        peer = self._known(key, "RegionsState")
        is_older = state.epoch < peer.epoch or state.generation < peer.regions.generation
        if is_older or peer.knows(state.epoch, state.generation):
            return
        ranks, has_lost = peer.described(state.descriptions), state.epoch > peer.epoch
        peer.replace(state)
        if has_lost:
            assert peer.facts is not None
            self._peers.on_revoked(peer, [0] * len(peer.facts.geometry.groups))
        self._load(peer, ranks, renew=has_lost)

    def _load(self, peer: Peer, ranks: Any, renew: bool = False) -> None:
        at = peer.epoch, peer.regions.generation

        def loaded() -> None:
            peer.loaded = max(peer.loaded, at)
            self._acknowledge(peer)

        self._peers.connect(peer, ranks, loaded, renew)

    def _acknowledge(self, peer: Peer) -> None:
        """What our connectors know; nothing while they are about to learn it."""
        epoch, generation = peer.loaded
        if generation:
            self._peers.send(peer.key, RegionsAck(generation))
        if epoch:
            self._peers.send(peer.key, RegionsRevoked(epoch))
