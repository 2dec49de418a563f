"""Bytes that no peer should send: random ones, real ones with a few changed, and messages of the
right shape with wrong values, made from the message types themselves."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import inspect

from kvxfer.control.lane_messages import LaneTrial
from kvxfer.control.messages import FirstToken, Message, PrefillRequest, Ready
from kvxfer.control.wire import encode

EDGE_INTS = (0, 1, -1, 2, 3, 4, 7, 63, 64, 65, 255, 4096, 2**31 - 1, 2**31, -(2**31), 2**32,
             2**47, 2**63 - 1, -(2**63), 2**63, 2**64 - 1)  # fmt: skip
EDGE_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-9, 0.5, 1e308, 5e-324, float("nan"), float("inf"))
EDGE_TEXTS = (
    *("", "0", "\0", "x" * 300, "../../etc/passwd", "\n\x1b[2J", "é"),
    *("loopback/push", "loopback/pull", "none/pull", "prefill-0", "decode-0", "prefill", "decode"),
)
EDGE_BYTES = (b"", b"\0", b"\xff" * 40, bytes(4096))

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


class WrongMessages:
    """A reproducible stream of them. Real messages are to be shown to it with `learn`. No Hello or
    Welcome bears the worker ids in `spared`: who has a key may pose as anybody, and whoever finds
    that a newer process has taken its place ends."""

    def __init__(self, seed: int, spared: Collection[str] = ()) -> None:
        self._random = random.Random(seed)
        self._spared = spared
        self._real: dict[str, list[Any]] = {}
        self._texts = list(EDGE_TEXTS)
        self._live = Live()
        self._makers: Sequence[Callable[[], bytes]] = (
            self.random_bytes,
            self.mutated_bytes,
            self.changed_message,
            self.changed_message,
            self.made_message,
            self.made_message,
        )

    def learn(self, message: Message) -> None:
        """A real one: its values, and its names of requests, grants and lanes, will come up."""
        value = msgspec.msgpack.decode(encode(message))
        facts = value.get("facts")
        if facts and facts["worker_id"] in self._spared:
            facts["worker_id"] += "-as-well"
        kept = self._real.setdefault(value["type"], [])
        kept.append(value)
        del kept[:-8]
        texts = [leaf for _, _, leaf in _leaves(value) if isinstance(leaf, str)]
        texts = [text for text in texts if text not in self._spared]
        self._texts = [*self._texts[: len(EDGE_TEXTS)], *(self._texts + texts)[-60:]]

    def next(self, live: Live) -> bytes:
        """`live`: what the sender was last told, which its message will often speak of."""
        if live.first:
            return msgspec.msgpack.encode(self._random.choice(self._real[live.first.pop()]))
        self._live = live if self._random.random() < 0.7 else Live(deck=live.deck)
        return self._random.choice(self._makers)()

    def nearly_right(self, live: Live, types: Sequence[str]) -> bytes:
        """One of these messages about what goes on right now; half of them are not changed."""
        self._live = live
        value = copy.deepcopy(self._random.choice(self._real[self._random.choice(types)]))
        if value["type"] in ("Generate", "PrefillRequest"):
            value["request_id"] = self._random.randbytes(4).hex()
        if "grant" in value:
            value["grant"]["grant_id"] = value["request_id"]
        self._live.put_into(value)
        if self._random.random() < 0.5:
            self._change(value)
        return msgspec.msgpack.encode(value)

    def random_bytes(self) -> bytes:
        longest = self._random.choice((8, 64, 512, 4096))
        return self._random.randbytes(self._random.randrange(longest))

    def mutated_bytes(self) -> bytes:
        data = bytearray(msgspec.msgpack.encode(self._any_real()))
        for _ in range(self._random.choice((1, 1, 2, 8))):
            at = self._random.randrange(len(data)) if data else 0
            match self._random.randrange(5):
                case 0 if data:
                    data[at] ^= 1 << self._random.randrange(8)
                case 1 if data:
                    data[at] = self._random.randrange(256)
                case 2:
                    del data[at:]
                case 3:
                    data[at:at] = self._random.randbytes(self._random.randrange(9))
                case _:
                    del data[at : at + self._random.randrange(9)]
        return bytes(data)

    def changed_message(self) -> bytes:
        """A real message, of another or at another time, in which up to three values are others."""
        value = self._live.put_into(copy.deepcopy(self._any_real()))
        for _ in range(self._random.choice((0, 1, 1, 2, 3))):
            self._change(value)
        return msgspec.msgpack.encode(value)

    def _change(self, value: Any) -> None:
        leaves = [leaf for leaf in _leaves(value) if leaf[1] != "type"]
        if leaves:
            holder, key, leaf = self._random.choice(leaves)
            holder[key] = self._another(leaf)

    def made_message(self) -> bytes:
        """Of each type in turn, all of its values made up."""
        deck = self._live.deck
        if not deck:
            deck += self._random.sample(list(TYPES), len(TYPES))
        value = self._live.put_into(self._make(TYPES[deck.pop()], 0))
        if self._random.random() < 0.05:
            value["surplus"] = 1
        return msgspec.msgpack.encode(value)

    def _any_real(self) -> Any:
        """Types evenly, not as often as they were seen."""
        return self._random.choice(self._real[self._random.choice(list(self._real))])

    def _another(self, leaf: Any) -> Any:
        """Mostly of the same type."""
        choose = self._random
        if choose.random() < 0.03:
            leaf = choose.choice((None, True, 1, 1.0, "", b"", [], {}))
        match leaf:
            case bool():
                return not leaf
            case int():
                return choose.choice((*EDGE_INTS, min(leaf + 1, EDGE_INTS[-1]), max(0, leaf - 1)))
            case float():
                return choose.choice(EDGE_FLOATS)
            case str():
                return choose.choice(self._texts)
            case bytes():
                return choose.choice((*EDGE_BYTES, leaf[:-1], leaf + b"\0"))
            case list():
                return choose.choice(([], leaf * 2, leaf[1:], leaf[::-1]))
        return leaf

    def _make(self, kind: Any, depth: int) -> Any:
        choose = self._random
        match kind:
            case inspect.StructType(fields=fields, tag=tag, tag_field=tag_field):
                made = {one.encode_name: self._make(one.type, depth + 1) for one in fields}
                return {tag_field: tag, **made} if tag_field else made
            case inspect.DataclassType(fields=fields):
                return {one.encode_name: self._make(one.type, depth + 1) for one in fields}
            case inspect.UnionType(types=types):
                return self._make(choose.choice(types), depth + 1)
            case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
                many = choose.choice((0, 1, 1, 1, 2, 3))
                return [self._make(item, depth + 1) for _ in range(many)]
            case inspect.TupleType(item_types=items):
                return [self._make(item, depth + 1) for item in items]
            case inspect.DictType(key_type=key, value_type=value):
                pairs = range(choose.randrange(3))
                return {self._make(key, depth): self._make(value, depth) for _ in pairs}
            case inspect.IntType():
                return choose.choice((*EDGE_INTS, 1, 4, 4))
            case inspect.FloatType():
                return choose.choice(EDGE_FLOATS)
            case inspect.StrType():
                return choose.choice(self._texts)
            case inspect.BytesType():
                return choose.choice(EDGE_BYTES)
            case inspect.BoolType():
                return choose.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.EnumType(cls=cls):
                return choose.choice([one.value for one in cls])
            case inspect.LiteralType(values=values):
                return choose.choice(values)
        raise TypeError(f"no values for {kind}: teach `_make`")


def _leaves(value: Any) -> list[tuple[Any, Any, Any]]:
    """(holder, key, value) of everything inside, lists themselves too."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in list(pairs):
        if not isinstance(inner, dict):
            found.append((value, key, inner))
        if isinstance(inner, dict | list):
            found += _leaves(inner)
    return found
