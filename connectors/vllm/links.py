"""A consumer's rank towards the producers that it dials. Service thread only.

| link     | meaning                       | leaves by               | deadline |
| ---      | ---                           | ---                     | ---      |
| DIALLING | nobody answers there yet      | connected: Hello        | `claim_timeout_s` |
|          |                               | → GREETED               | → GONE |
| GREETED  | Hello is out                  | Welcome → READY;        | the same |
|          |                               | Reject → GONE           | |
| READY    | the endpoint knows its memory | Leave → LEAVING;        | `peer_timeout_s` of |
|          |                               | Unknown → GONE          | silence → GONE |
| LEAVING  | what waited for it has failed | our tickets with it are | the same |
|          |                               | done: Goodbye → GONE    | |
| GONE     | the same                      | a claim: dialled anew   | |
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from connectors.vllm.messages import (
    WIRE_VERSION,
    Facts,
    Goodbye,
    Heartbeat,
    Hello,
    Leave,
    Message,
    Reject,
    Unknown,
    Welcome,
    check_same,
)
from connectors.vllm.options import Options
from kvxfer.control.channel import Channel
from kvxfer.errors import ControlError, HandshakeRejected, KvxferError, WireError
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.endpoint import Endpoint
from kvxfer.transfer.lanes import Lane

logger = logging.getLogger(__name__)


MAX_LINKS = 512
"""Addresses come with requests, from clients."""


class LinkState(enum.Enum):
    DIALLING = enum.auto()
    GREETED = enum.auto()
    READY = enum.auto()
    LEAVING = enum.auto()


@dataclass(slots=True)
class Link:
    address: str
    key: str
    """The channel's."""
    since_s: float
    seen_s: float = 0.0
    state: LinkState = LinkState.DIALLING
    facts: Facts | None = None
    """Once it is READY."""
    lane: Lane | None = None
    """By which we read."""

    @property
    def name(self) -> str:
        return self.facts.name if self.facts else self.address


class Links:
    """All of them, by address. `on_ready` and `on_gone` tell their owner."""

    def __init__(
        self,
        options: Options,
        facts: Facts,
        channel: Channel,
        endpoint: Endpoint,
        on_ready: Callable[[Link], None],
        on_gone: Callable[[Link, str], None],
    ) -> None:
        self._options = options
        self._facts = facts
        self._channel = channel
        self._endpoint = endpoint
        self._on_ready = on_ready
        self._on_gone = on_gone
        self._links: dict[str, Link] = {}
        self._by_key: dict[str, Link] = {}

    def dial(self, address: str) -> Link:
        """The link there is, or a new one. Raises UsageError for what must not be dialled,
        ControlError for one that is leaving or one too many."""
        link = self._links.get(address)
        if link is not None and link.state is LinkState.LEAVING:
            raise ControlError(f"producer {link.name} is leaving")
        if link is None:
            if len(self._links) >= MAX_LINKS:
                raise ControlError(f"{address}: {MAX_LINKS} producers are dialled already")
            link = Link(address, self._channel.dial(address), time.monotonic())
            self._links[address] = self._by_key[link.key] = link
            self._greet(link)
        return link

    def send(self, link: Link, message: Message) -> None:
        """A link that takes nothing more is gone."""
        try:
            self._channel.send(link.key, message)  # type: ignore[arg-type]
        except ControlError as error:
            self.lose(link, str(error))

    def hear(self, key: str, message: Message) -> Link | None:
        """Who said it, where it is about requests and the link is READY."""
        link = self._by_key.get(key)
        if link is None:
            return None
        link.seen_s = time.monotonic()
        if isinstance(message, Welcome):
            self._on_welcome(link, message)
        elif isinstance(message, Reject):
            self.lose(link, str(HandshakeRejected(message.field, message.theirs, message.ours)))
        elif isinstance(message, Unknown):
            self.lose(link, "it does not know us any more")
        elif isinstance(message, Leave):
            self._leave(link, message.reason)
        elif link.state is LinkState.READY and not isinstance(message, Heartbeat):
            return link
        return None

    def tick(self, now_s: float, is_beat: bool) -> None:
        for link in list(self._links.values()):
            if link.state in (LinkState.READY, LinkState.LEAVING):
                silent_s = now_s - link.seen_s
                if silent_s > self._options.peer_timeout_s:
                    self.lose(link, f"nothing heard for {self._options.peer_timeout_s:g} s")
                elif link.state is LinkState.LEAVING:
                    self._say_goodbye(link)
                elif is_beat:
                    self.send(link, Heartbeat())
            elif now_s - link.since_s > self._options.claim_timeout_s:
                self.lose(link, f"no answer in {self._options.claim_timeout_s:g} s")
            elif link.state is LinkState.DIALLING:
                self._greet(link)

    def lose(self, link: Link, reason: str) -> None:
        """It is dead, or as good as that: our tickets with it end when the transport says so."""
        if not self._forget(link):
            return
        if link.facts is not None:
            self._endpoint.fence(link.facts.name)
        logger.warning("producer %s is gone: %s", link.name, reason)
        self._on_gone(link, reason)

    def close(self, reason: str) -> None:
        """Leave all. Nothing of ours is under way with any, but with those that are dead."""
        for link in list(self._links.values()):
            if link.state in (LinkState.READY, LinkState.LEAVING):
                self._say_goodbye(link)
            self._forget(link)

    def _leave(self, link: Link, reason: str) -> None:
        if link.state is not LinkState.READY:
            self.lose(link, reason)
            return
        link.state = LinkState.LEAVING
        logger.info("producer %s is leaving: %s", link.name, reason)
        self._on_gone(link, reason)
        self._say_goodbye(link)

    def _say_goodbye(self, link: Link) -> None:
        """As soon as nothing of ours is under way with it."""
        assert link.facts is not None
        try:
            told = self._endpoint.disconnect(link.facts.name)
        except KvxferError as error:
            logger.debug("producer %s: not yet: %s", link.name, error)
            return
        self.send(link, Goodbye(told))
        self._forget(link)

    def _forget(self, link: Link) -> bool:
        if self._links.get(link.address) is not link:
            return False
        del self._links[link.address], self._by_key[link.key]
        self._channel.hang_up(link.key)
        return True

    def _greet(self, link: Link) -> None:
        try:
            self._channel.send(link.key, Hello(WIRE_VERSION, self._facts))  # type: ignore[arg-type]
        except ControlError:
            return  # no connection yet: the next tick tries again
        link.state = LinkState.GREETED

    def _on_welcome(self, link: Link, welcome: Welcome) -> None:
        if link.state is not LinkState.GREETED:
            self.lose(link, "it welcomed us twice")
            return
        try:
            if welcome.wire_version != WIRE_VERSION:
                raise HandshakeRejected("wire_version", WIRE_VERSION, welcome.wire_version)
            check_same(self._facts, welcome.facts)
            lanes = self._endpoint.connect(welcome.facts.name, welcome.description)
            pulls = [lane for lane in lanes if lane.direction is Direction.PULL]
            if not pulls:
                raise WireError(f"no lane that we may pull by: {', '.join(map(str, lanes))}")
        except KvxferError as error:
            self.send(link, Goodbye(b""))
            self.lose(link, str(error))
            return
        link.facts, link.lane, link.state = welcome.facts, pulls[0], LinkState.READY
        logger.info("producer %s is there, by %s", link.name, link.lane)
        self._on_ready(link)
