"""Hello, Welcome and Reject: who may be a peer of whom.

The one who dials says Hello, the other answers Welcome once its connector has loaded the dialler's
regions, or Reject with the field that differs. Who answers lives on, whomever it refused. A pair is
refused to who dialled by Reject, by a Welcome that does not fit, or by lanes slower than asked for:

| refused are                                  | what comes of it |
| ---                                          | --- |
| all that it dialled, before any was ready    | it ends: HandshakeRejected names the field |
| all, as a newer process has taken its place  | the same |
| some; or all of one that had a ready peer:   | they are GONE, `refused` in Status, and greeted |
| a peer was started again otherwise; or all   | again, later and later: they may be set right, |
| of one that a router tells of others         | and others may come |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvxfer.control.facts import WorkerFacts
from kvxfer.control.messages import WIRE_VERSION, Goodbye, Hello, Reject, Welcome
from kvxfer.control.resync_messages import HelloWanted
from kvxfer.control.session import Peer, PeerState, agree
from kvxfer.errors import HandshakeRejected, KvxferError, WireError
from kvxfer.worker.incarnations import Incarnations

if TYPE_CHECKING:
    from kvxfer.worker.peers import PeerTable

logger = logging.getLogger(__name__)


class Greeting:
    """Control thread only."""

    def __init__(self, peers: PeerTable) -> None:
        self._peers = peers
        self._incarnations = Incarnations()
        self.handlers: dict[type, Callable[[str, Any], None]] = {
            Hello: self._on_hello,
            Welcome: self._on_welcome,
            Reject: self._on_reject,
            HelloWanted: self._on_hello_wanted,
        }

    # --- who was dialled ------------------------------------------------------------------------

    def _on_hello(self, key: str, hello: Hello) -> None:
        if self._peers.has_left:
            return  # our successor, if there is one, will answer
        if hello.wire_version != WIRE_VERSION:
            self._reject(key, HandshakeRejected("wire_version", WIRE_VERSION, hello.wire_version))
        elif hello.facts is None:
            self._peers.add(Peer(key, time.monotonic(), PeerState.READY))
            self._peers.send(key, Welcome(WIRE_VERSION, self._peers.facts(0), ""))
        else:
            self._greet(key, hello.facts)

    def _greet(self, key: str, facts: WorkerFacts) -> None:
        """Idempotent: a Hello that is repeated is answered again."""
        peer = self._peers.get(key) or Peer(key, time.monotonic())
        try:
            self._incarnations.check(facts)
            peer.learn(facts, agree(self._peers.facts(0), facts))
        except KvxferError as error:
            self._reject(key, error)
            return
        self._peers.add(peer)
        self._replace_older(peer, facts)
        invited = len(facts.ranks)
        # What both begin with: the lane that a session before this one chose is not asked about.
        lane = str(peer.lanes[0])
        self._peers.load(peer, lambda: Welcome(WIRE_VERSION, self._peers.facts(invited), lane))

    def _replace_older(self, peer: Peer, facts: WorkerFacts) -> None:
        """Drop all that an older process of the same worker had, if this one is new."""
        for old in self._peers.all():
            if old is not peer and old.facts and old.name == facts.worker_id:
                self._peers.lose(old.key, "a new process of the same worker is here")
        self._peers.holders.met(peer, facts)
        if self._incarnations.met(facts):
            self._peers.on_fenced(facts.worker_id)

    def _reject(self, key: str, error: KvxferError) -> None:
        logger.warning("refused %s: %s", key, error)
        if isinstance(error, HandshakeRejected):
            reject = Reject(error.field, str(error.theirs), str(error.ours))
        else:
            reject = Reject("facts", "", str(error))
        self._peers.answer_stranger(key, reject)

    # --- who dialled ----------------------------------------------------------------------------

    def _on_welcome(self, key: str, welcome: Welcome) -> None:
        peer = self._peers.get(key)
        if peer is None or not key.startswith("out:"):
            raise WireError(f"Welcome from {key}, whom nobody greeted")
        try:
            self._learn(peer, welcome)
        except HandshakeRejected as error:
            self.refuse(peer, error)

    def _learn(self, peer: Peer, welcome: Welcome) -> None:
        """Raises HandshakeRejected where it does not fit, WireError where it cannot be."""
        if welcome.wire_version != WIRE_VERSION:
            raise HandshakeRejected("wire_version", WIRE_VERSION, welcome.wire_version)
        facts = welcome.facts
        if self._incarnations.is_over(facts):
            return  # under way since before the one that we know was started
        self._check_unique(peer, facts)
        if peer.is_met and peer.facts and peer.facts.incarnation == facts.incarnation:
            return  # the answer to a Hello that was repeated
        lanes = agree(self._peers.facts(0), facts)
        if welcome.lane != str(lanes[0]):
            raise HandshakeRejected("lane", lanes[0], welcome.lane)
        if peer.is_met:
            self._peers.lose(peer.key, "a new process answers")
        peer.state = PeerState.GREETING
        peer.learn(facts, lanes)
        self._replace_older(peer, facts)
        self._peers.holders.renewed(peer)  # it answers when its connectors have loaded our Hello's
        self._peers.load(peer, None)

    def _check_unique(self, peer: Peer, facts: WorkerFacts) -> None:
        """Raises WireError where somebody else of the same id is met: which of them is the newer
        one shows once the other has gone."""
        for other in self._peers.all():
            if other is not peer and other.is_met and other.name == facts.worker_id:
                raise WireError(f"{peer.key}: worker_id {facts.worker_id!r} is {other.key}'s")

    def _on_reject(self, key: str, reject: Reject) -> None:
        peer = self._peers.get(key)
        if peer is None or not key.startswith("out:"):
            raise WireError(f"Reject from {key}, whom nobody greeted")
        if not peer.is_met:
            peer.hello_sent_s = 0.0  # it has loaded nothing of ours
        self.refuse(peer, HandshakeRejected(reject.field, reject.ours, reject.theirs))

    def refuse(self, peer: Peer, error: HandshakeRejected) -> None:
        """No KV may flow between us and `peer`, whom we dialled. Raises `error` where nobody is
        left for whom it would make sense to live on."""
        is_news = str(peer.refusal) != str(error)
        peer.refusal = error
        refusals = [one.refusal for one in self._peers.dialled()]
        fields = {one.field if one is not None else "" for one in refusals}
        is_replaced = fields == {"incarnation"}
        has_hope = self._peers.was_ready or self._peers.may_find_others or None in refusals
        if is_replaced or not has_hope:
            raise error
        if is_news:
            address = peer.key.removeprefix("out:")
            logger.warning("%s: %s; it is greeted again, later and later", address, error)
        self._peers.answer_stranger(
            peer.key, Goodbye(f"refused: {error}", False)
        )  # it may have met us
        self._peers.lose(peer.key, str(error))
        peer.hello_sent_s = time.monotonic()  # not at once

    def _on_hello_wanted(self, key: str, wanted: HelloWanted) -> None:
        """Whom we dialled restarted or lost us. Nothing to do where we are greeting it anyway."""
        peer = self._peers.get(key)
        if peer is not None and peer.is_met and key.startswith("out:"):
            self._peers.lose(key, "it does not know us any more")
