"""Who is still there: heartbeats, silence, and greetings until they are answered."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable

from kvxfer.control.channel import Channel
from kvxfer.control.facts import WorkerFacts
from kvxfer.control.messages import WIRE_VERSION, Heartbeat, Hello, Message
from kvxfer.control.resync_messages import RegionsAt
from kvxfer.control.session import MAX_RANKS, Peer, PeerState
from kvxfer.errors import ControlError

logger = logging.getLogger(__name__)

HELLO_RETRY_S = 1.0
HELLO_RETRY_MAX_S = 5.0
REFUSED_RETRY_MAX_S = 30.0
"""Of one that was refused: each greeting costs it, and us, a look at what does not fit."""
HELLO_JITTER = 0.25
"""Pauses between greetings double up to the maximum, each longer or shorter by up to this share, so
that many who lost the same worker do not greet it at once."""
CHOICE_TIMEOUT_S = 30.0
"""Longer than whoever leads the trials of lanes takes."""


class Liveness:
    """Control thread only."""

    def __init__(
        self, channel: Channel, facts: Callable[[int], WorkerFacts], timeout_s: float
    ) -> None:
        self._channel = channel
        self._facts = facts
        self._timeout_s = timeout_s
        self._next_beat_s = 0.0

    def tick(
        self,
        peers: Iterable[Peer],
        where: RegionsAt,
        send: Callable[[str, Message], object],
        lose: Callable[[str, str], None],
    ) -> None:
        now = time.monotonic()
        known = list(peers)
        for peer in known:
            reason = self._why_lost(peer, now)
            if reason:
                lose(peer.key, reason)
        if now >= self._next_beat_s:
            self._next_beat_s = now + self._timeout_s / 6
            for peer in known:
                if peer.is_met:
                    send(peer.key, Heartbeat())
                    if peer.facts and peer.is_met:
                        send(peer.key, where)
        for peer in known:
            if not peer.is_met and peer.key.startswith("out:"):
                self._say_hello(peer, now, where.epoch)

    def _why_lost(self, peer: Peer, now: float) -> str:
        if peer.is_met and now - peer.last_seen_s > self._timeout_s:
            return f"nothing heard for {self._timeout_s:g} s"
        if peer.state is PeerState.MET and now - peer.met_s > CHOICE_TIMEOUT_S:
            return f"no lane was chosen in {CHOICE_TIMEOUT_S:g} s"
        return ""

    def _say_hello(self, peer: Peer, now: float, epoch: int) -> None:
        """Greet, or greet again; nothing happens while there is no connection to send on."""
        if now - peer.hello_sent_s < peer.hello_pause_s:
            return
        try:
            self._channel.send(peer.key, Hello(WIRE_VERSION, self._facts(MAX_RANKS)))
        except ControlError as error:
            logger.debug("%s is not there yet: %s", peer.key, error)
            return
        if peer.state is not PeerState.GREETING:
            peer.told_epoch = epoch
        peer.state = PeerState.GREETING
        peer.hello_sent_s = now
        peer.num_hellos += 1
        peer.hello_pause_s = hello_pause(
            peer.num_hellos, random.random(), is_refused=peer.refusal is not None
        )


def hello_pause(num_sent: int, chance: float, *, is_refused: bool = False) -> float:
    """Seconds to wait for an answer to the last of so many greetings; `chance` is in [0, 1)."""
    bound_s = REFUSED_RETRY_MAX_S if is_refused else HELLO_RETRY_MAX_S
    longest = min(bound_s, HELLO_RETRY_S * 2.0 ** min(num_sent - 1, 16))
    return longest * (1 + HELLO_JITTER * (2 * chance - 1))
