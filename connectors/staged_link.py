"""Connections of the staged way: who is known, by which session, and whether it still answers.

A link is a peer's agent and its ring. Either side may have made it: `connect` from what the control
plane was told, or a Greeting from what the other side says of itself. Sessions keep what was said
before a link was given up from being taken for news.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from connectors.staged_agent import StagedAgent
from connectors.staged_messages import (
    Bye,
    Greeting,
    Message,
    Ping,
    Ring,
    SlotMessage,
    decode,
    notifications,
)
from kvxfer.errors import ConnectorError
from kvxfer.transfer.envelope import seal, unseal
from kvxfer.transfer.reach import RemotePeer
from kvxfer.transfer.regions import Region, RegionSet

logger = logging.getLogger(__name__)

PROBE_S = 1.0
"""A peer from which something is awaited is asked for a sign of life so often."""
LINGER_S = 5.0
"""A link that nobody here wants is kept so long after its last use."""

Clock = Callable[[], float]


@dataclass(slots=True, eq=False)
class Link:
    """One peer's agent. `remote_session` is None until it has greeted us."""

    ring: Ring
    remote: RemotePeer
    """The ring, as the agent knows it."""
    heard_s: float
    """When it last said something."""
    session: int = field(default_factory=lambda: secrets.randbits(62) | 1)
    remote_session: int | None = None
    is_wanted: bool = False
    """Whether a `connect` of ours stands behind it."""
    failure: str | None = None
    """Why nothing can be sent any more."""
    probed_s: float = 0.0
    used_s: float = 0.0
    is_fresh: bool = True
    """Nothing was said yet, by either side, that this session of ours is about."""
    unsent: list[Message] = field(default_factory=list)
    """What `Links.flush` sends."""

    @property
    def agent(self) -> str:
        return self.ring.agent

    @property
    def is_ready(self) -> bool:
        return self.failure is None and self.remote_session is not None


def remote_of(ring: Ring) -> RemotePeer:
    regions = RegionSet((Region(0, ring.total_bytes),), 1)
    return RemotePeer(ring.agent, ring.device, ring.base_address, regions)


def seal_ring(ring: Ring) -> bytes:
    return seal(msgspec.msgpack.encode(ring))


def unseal_ring(data: bytes) -> Ring:
    """Raises ConnectorError unless `data` is what `seal_ring` made."""
    try:
        ring = msgspec.msgpack.decode(unseal(data), type=Ring)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConnectorError(f"description of a staging ring does not decode: {error}") from error
    if ring.base_address + ring.total_bytes >= 1 << 63:
        raise ConnectorError(f"staging ring: {ring.total_bytes} bytes from {ring.base_address:#x}")
    return ring


class Links:
    """All links of one agent. `lost` is told of each whose slots and tickets are to be settled:
    the peer gave it up, or the transport broke."""

    def __init__(
        self, agent: StagedAgent, ring: Ring, clock: Clock, lost: Callable[[Link, str], None]
    ) -> None:
        self._agent = agent
        self._sealed = seal_ring(ring)
        self._clock = clock
        self._lost = lost
        self._links: dict[str, Link] = {}
        self._leaving: set[str] = set()
        """Agents that NIXL is to forget, once nothing is written to them any more."""

    def all(self) -> list[Link]:
        return list(self._links.values())

    def find(self, agent: str) -> Link | None:
        return self._links.get(agent)

    def open(self, ring: Ring) -> Link:
        """The link to the agent of `ring`, which is made if there is none that works. Raises
        ConnectorError where it cannot be, and changes nothing then."""
        known = self._links.get(ring.agent)
        if known is not None and known.failure is None:
            if known.ring != ring:
                raise ConnectorError(f"agent {ring.agent} has another staging ring than before")
            return known
        if ring.agent in self._leaving:
            raise ConnectorError(f"agent {ring.agent}: what was written to it has not ended yet")
        now_s = self._clock()
        link = Link(ring, remote_of(ring), now_s, used_s=now_s)
        self._agent.add_peer(link.remote, ring.metadata)
        if known is not None:
            link.is_wanted = known.is_wanted
        self._links[ring.agent] = link
        return link

    def greet(self, link: Link) -> None:
        """Tell the peer our session with it, and ask for its own if that is unknown."""
        link.unsent.append(Greeting(link.session, link.remote_session or 0, self._sealed))
        self._post(link)

    def send(self, link: Link, make: Callable[[int], Message]) -> None:
        """With the next `flush`. `make` is given the peer's session. Nothing goes to a link that is
        not ready: its peer has given up what the message is about."""
        if link.is_ready and link.remote_session is not None:
            link.used_s = self._clock()
            message = make(link.remote_session)
            link.is_fresh = link.is_fresh and isinstance(message, Ping)
            link.unsent.append(message)

    def flush(self) -> None:
        """What was said in a turn goes out, in one notification a peer: one takes longer than many
        messages do."""
        for link in [one for one in self._links.values() if one.unsent]:
            self._post(link)

    def receive(self) -> list[tuple[Link, SlotMessage | ConnectorError]]:
        """What is for others to handle, of the messages that came: those of the present session,
        and errors for what is no message."""
        found: list[tuple[Link, SlotMessage | ConnectorError]] = []
        for agent, data in self._agent.received():
            try:
                for message in decode(data):
                    self._hear(agent, message, found)
            except ConnectorError as error:
                known = self._links.get(agent)
                logger.warning("agent %s said what is refused: %s", agent, error)
                if known is not None:
                    found.append((known, error))
        return found

    def probe(self, link: Link) -> None:
        """Have the peer say something; at most once in PROBE_S."""
        now_s = self._clock()
        if link.failure is not None or now_s - max(link.heard_s, link.probed_s) < PROBE_S:
            return
        link.probed_s = now_s
        if link.is_ready:
            self.send(link, Ping)
        else:
            self.greet(link)

    def leave(self, link: Link) -> None:
        """Give up a link over which nothing is under way."""
        self.send(link, Bye)
        if link.unsent:
            self._post(link)
        self._drop(link)

    def fail(self, link: Link, reason: str) -> None:
        """The transport to the peer broke."""
        if link.failure is not None:
            return
        link.failure = reason
        link.unsent.clear()
        self._leaving.add(link.agent)
        if not link.is_wanted and self._links.get(link.agent) is link:
            del self._links[link.agent]
        self._lost(link, reason)

    def sweep(self, written_to: set[str]) -> None:
        """Have NIXL forget agents that are to go, but for those that are being written to."""
        for agent in self._leaving - written_to:
            self._leaving.discard(agent)
            self._agent.remove_peer(agent)

    def _hear(
        self, agent: str, message: Message, found: list[tuple[Link, SlotMessage | ConnectorError]]
    ) -> None:
        link = self._links.get(agent)
        if isinstance(message, Greeting):
            self._greeted(agent, message)
        elif link is not None and message.to == link.session:
            link.heard_s = self._clock()
            if isinstance(message, Bye):
                self._reset(link, f"agent {agent} gave the connection up")
            elif isinstance(message, Ping):
                self._answer(link, message)
            else:
                link.is_fresh = False
                found.append((link, message))

    def _greeted(self, agent: str, greeting: Greeting) -> None:
        ring = unseal_ring(greeting.ring)
        if ring.agent != agent:
            raise ConnectorError(f"agent {agent} greets as {ring.agent}")
        link = self.open(ring)
        # Its answer to our beginning anew is no new beginning to answer: two sides whose greetings
        # crossed would go on for ever. Once a slot may be in use, only a new session fences it.
        is_answer = link.is_fresh and greeting.to == link.session
        if link.remote_session not in (None, greeting.session) and not is_answer:
            self._reset(link, f"agent {agent} began anew")
        link.remote_session = greeting.session
        link.heard_s = link.used_s = self._clock()
        if greeting.to != link.session:
            self.greet(link)

    def _answer(self, link: Link, ping: Ping) -> None:
        if not ping.is_answer:
            self.send(link, lambda to: Ping(to, True))

    def _reset(self, link: Link, reason: str) -> None:
        """The peer knows nothing of our session any more: the next one is new to it."""
        link.session = secrets.randbits(62) | 1
        link.is_fresh = True
        link.remote_session = None
        link.unsent.clear()
        self._lost(link, reason)

    def _drop(self, link: Link) -> None:
        if self._links.get(link.agent) is link:
            del self._links[link.agent]
        if link.failure is None:
            link.failure = "it was given up"
            self._leaving.add(link.agent)

    def _post(self, link: Link) -> None:
        unsent, link.unsent = link.unsent, []
        try:
            for data in notifications(unsent):
                self._agent.notify(link.agent, data)
        except ConnectorError as error:
            self.fail(link, str(error))
