"""Bytes that no peer should send: random ones, real ones with a few changed, and messages of the
right shape with wrong values, made from the message types themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import inspect
from support.wrong_values import EDGE_TEXTS, WrongValues, leaves_of

from kvxfer.control.lane_messages import LaneTrial
from kvxfer.control.messages import FirstToken, Hello, Message, PrefillRequest, Ready, Welcome
from kvxfer.control.wire import decode, encode, join
from kvxfer.errors import WireError

OURS = ("prefill-0", "decode-0")
"""The workers that are attacked."""
TYPES: dict[str, inspect.StructType] = {
    str(one.tag): one
    for one in inspect.type_info(Message).types  # type: ignore[attr-defined]
    if isinstance(one, inspect.StructType)
}
"""Every message by its name."""


@dataclass
class Live:
    """Names of a request and of a trial that go on right now, '' where none is known."""

    request_id: str = ""
    grant_id: str = ""
    trial_id: str = ""
    first: list[str] = field(default_factory=list)
    """Types of message to say once as they are, before anything wrong: every handler is reached."""
    deck: list[str] = field(default_factory=list)
    """Types of message that this sender is still to make one of."""

    def learn(self, message: Message) -> None:
        match message:
            case PrefillRequest(request_id=request_id, grant=grant):
                self.request_id, self.grant_id = request_id, grant.grant_id
            case Ready(request_id=request_id, lease=lease):
                self.request_id, self.grant_id = request_id, lease.lease_id
            case FirstToken(request_id=request_id, grant_id=grant_id):
                self.request_id, self.grant_id = request_id, grant_id
            case LaneTrial(trial_id=trial_id):
                self.trial_id = trial_id

    def put_into(self, value: dict[str, Any]) -> dict[str, Any]:
        """`value` with those names where it has such."""
        known = {"request_id": self.request_id, "trial_id": self.trial_id}
        known |= dict.fromkeys(("grant_id", "lease_id"), self.grant_id)
        is_new = value["type"] in ("Generate", "PrefillRequest")
        for holder in (value, value.get("lease")):
            for name, text in known.items():
                if isinstance(holder, dict) and name in holder and text and not is_new:
                    holder[name] = text
        return value


class WrongMessages(WrongValues):
    """A reproducible stream of them. Real messages are to be shown to it with `learn`."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._real: dict[str, list[Any]] = {}
        self._live = Live()
        self._makers: Sequence[Callable[[], bytes]] = (
            self.random_bytes,
            self.mutated_bytes,
            self.changed_message,
            self.changed_message,
            self.made_message,
            self.made_message,
            self.deep_message,
        )

    def learn(self, message: Message) -> None:
        """A real one: its values, and its names of requests, grants and lanes, will come up."""
        value = msgspec.msgpack.decode(encode(message))
        kept = self._real.setdefault(value["type"], [])
        kept.append(value)
        del kept[:-8]
        texts = [leaf for _, _, leaf in leaves_of(value) if isinstance(leaf, str)]
        self.texts = [*self.texts[: len(EDGE_TEXTS)], *(self.texts + texts)[-60:]]

    def next(self, live: Live) -> bytes:
        """`live`: what the sender was last told, which its message will often speak of."""
        is_plain = bool(live.first) or self.random.random() >= 0.05
        data = self._unless_posing(self._next(live))
        return data if is_plain else join([data, self._unless_posing(self.changed_message())])

    def _unless_posing(self, data: bytes) -> bytes:
        """Who has a key can pose as any worker (README, 'Security'). Done while that one is away it
        takes its place, and the real one ends when it is told so: as designed, and not looked for
        here."""
        try:
            message = decode(data)
        except WireError:
            return data
        facts = message.facts if isinstance(message, Hello | Welcome) else None
        if facts is None or facts.worker_id not in OURS:
            return data
        renamed = msgspec.structs.replace(facts, worker_id=f"{facts.worker_id}x")
        return encode(msgspec.structs.replace(message, facts=renamed))

    def _next(self, live: Live) -> bytes:
        if live.first:
            return msgspec.msgpack.encode(self.random.choice(self._real[live.first.pop()]))
        self._live = live if self.random.random() < 0.7 else Live(deck=live.deck)
        return self.random.choice(self._makers)()

    def nearly_right(self, live: Live, types: Sequence[str]) -> bytes:
        """One of these messages about what goes on right now; half of them are not changed."""
        self._live = live
        value = copy.deepcopy(self.random.choice(self._real[self.random.choice(types)]))
        if value["type"] in ("Generate", "PrefillRequest"):
            value["request_id"] = self.random.randbytes(4).hex()
        if "grant" in value:
            value["grant"]["grant_id"] = value["request_id"]
        self._live.put_into(value)
        if self.random.random() < 0.5:
            self.change(value)
        return self._unless_posing(msgspec.msgpack.encode(value))

    def mutated_bytes(self) -> bytes:
        return self.mutated(msgspec.msgpack.encode(self._any_real()))

    def changed_message(self) -> bytes:
        """A real message, of another or at another time, in which up to three values are others."""
        value = self._live.put_into(copy.deepcopy(self._any_real()))
        for _ in range(self.random.choice((0, 1, 1, 2, 3))):
            self.change(value)
        return msgspec.msgpack.encode(value)

    def made_message(self) -> bytes:
        """Of each type in turn, all of its values made up."""
        deck = self._live.deck
        if not deck:
            deck += self.random.sample(list(TYPES), len(TYPES))
        value = self._live.put_into(self.make(TYPES[deck.pop()], 0))
        if self.random.random() < 0.05:
            value["surplus"] = 1
        return msgspec.msgpack.encode(value)

    def deep_message(self) -> bytes:
        """Nested so deeply that whoever reads it by recursion comes to an end."""
        return self.deeper(msgspec.msgpack.encode(self._any_real()))

    def _any_real(self) -> Any:
        """Types evenly, not as often as they were seen."""
        return self.random.choice(self._real[self.random.choice(list(self._real))])
