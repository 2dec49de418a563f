"""Wrong frames and notifications of connectors, and the ends that they are sent to."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from msgspec import inspect
from support.staged_sides import DEADLINE_S, SOME, Side
from support.wrong_values import WrongValues

from connectors import staged_link
from connectors.staged_link import Link
from connectors.staged_messages import (
    Ask,
    Bye,
    Grant,
    Greeting,
    Landed,
    Message,
    Offer,
    Piece,
    Ping,
    Refused,
    Return,
    WireNest,
    Written,
)
from kvxfer.errors import ConnectorError
from kvxfer.transfer.connector import Direction


def types_of(union: Any) -> dict[str, inspect.StructType]:
    """The members of a union of tagged structs, by name."""
    members = inspect.type_info(union).types  # type: ignore[attr-defined]
    return {str(one.tag): one for one in members if isinstance(one, inspect.StructType)}


class WrongFrames(WrongValues):
    """A reproducible stream of frames of `union`, made from what is `real`."""

    def __init__(self, seed: int, union: Any, real: Sequence[msgspec.Struct]) -> None:
        super().__init__(seed)
        self.types = types_of(union)
        self.real = [msgspec.msgpack.decode(msgspec.msgpack.encode(one)) for one in real]

    def next(self) -> bytes:
        """Random bytes, a real one with a few changed, one of the right shape and wrong values, or
        one that is nested without end."""
        real = copy.deepcopy(self.random.choice(self.real))
        match self.random.randrange(6):
            case 0:
                return self.random_bytes()
            case 1:
                return self.mutated(msgspec.msgpack.encode(real))
            case 2:
                return self.deeper(msgspec.msgpack.encode(real))
            case 3:
                self.change(real)
                return msgspec.msgpack.encode(real)
            case 4:
                return msgspec.msgpack.encode(real)
        kind = self.random.choice(list(self.types))
        return msgspec.msgpack.encode(self.make(self.types[kind], 0))


class Watched:
    """Counts, by the type of its last argument or of what it returns, what a function is given."""

    def __init__(self) -> None:
        self.decoded: Counter[str] = Counter()
        self.handled: Counter[str] = Counter()
        """'NAME taken' and 'NAME refused'."""

    def decoder(self, function: Callable[..., Any], value: Callable[[Any], Any]) -> Any:
        """`function`, whose results hold messages: `value` gives a list of them."""

        def call(*arguments: Any) -> Any:
            found = function(*arguments)
            if found is not None:
                self.decoded.update(type(one).__name__ for one in value(found))
            return found

        return call

    def handler(self, function: Callable[..., Any], position: int) -> Any:
        """`function`, whose argument at `position` is a message."""

        def call(*arguments: Any) -> Any:
            name = type(arguments[position]).__name__
            try:
                result = function(*arguments)
            except ConnectorError:
                self.handled[f"{name} refused"] += 1
                raise
            self.handled[f"{name} taken"] += 1
            return result

        return call

    @property
    def reached(self) -> frozenset[str]:
        """Names whose handler was called."""
        return frozenset(name.partition(" ")[0] for name in self.handled)


HERE = (WireNest(bytes(8), (), (), 64),)
EXAMPLES: tuple[msgspec.Struct, ...] = (
    Ping(1),
    Bye(1),
    Ask(1, 1, 0, 64, HERE),
    Written(1, 1, 0),
    Refused(1, 1, 0, "no"),
    Offer(1, 1, 2),
    Grant(1, 1, 0),
    Piece(1, 1, 0, 64, HERE),
    Return(1, 1, 0),
    Landed(1, 1, 0),
)
SEND_BYE = 0.3
"""Of those that are made: a session that ends says little."""
MAX_GREETINGS = 1000


class StagedAttack:
    """Says in the name of `left` what is wrong to `right`, which has tickets with it all the time:
    of the present session, mostly, and about those tickets."""

    def __init__(self, left: Side, right: Side, seed: int) -> None:
        self._left, self._right = left, right
        self._ours = left.connector._engine.links
        self._theirs = right.connector._engine.links
        greeting = Greeting(1, 1, self._ours._sealed)
        self._wrong = WrongFrames(seed, Message, (*EXAMPLES, greeting))
        self.watched = Watched()
        self._open: set[int] = set()

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        watched, links, engine = self.watched, self._theirs, self._right.connector._engine
        decode = watched.decoder(staged_link.decode, lambda found: found)
        monkeypatch.setattr(staged_link, "decode", decode)
        for owner, name in (
            (engine.source, "handle"),
            (engine.target, "handle"),
            (links, "_greeted"),
            (links, "_answer"),
        ):
            monkeypatch.setattr(owner, name, watched.handler(getattr(owner, name), 1))
        reset = links._reset

        def counted(link: Link, reason: str) -> None:
            watched.handled["Bye taken"] += "gave the connection up" in reason
            reset(link, reason)

        monkeypatch.setattr(links, "_reset", counted)

    def send(self) -> None:
        """One notification, and the turns in which it is taken in and answered."""
        for _ in range(MAX_GREETINGS):
            known = self._theirs.find(self._left.connector._name)
            if known is not None and known.is_ready:
                break
            self._meet_again()
            self._turn()
        else:
            raise AssertionError("they do not meet again")
        self._start_tickets()
        agent = self._left.connector._engine.site.agent
        agent.notify(self._right.connector._name, self._next(known.session))
        self._turn()

    def _meet_again(self) -> None:
        ours = self._ours.find(self._right.connector._name)
        if ours is None or ours.failure is not None:
            self._left.meet(self._right)
        else:
            self._ours.greet(ours)

    def _start_tickets(self) -> None:
        if len(self._open) < 4:
            direction = self._wrong.random.choice(list(Direction))
            try:
                self._open.add(self._right.connector.submit("left", direction, SOME))
            except ConnectorError:  # the link broke just now
                self._right.meet(self._left)

    def _turn(self) -> None:
        self._open -= {one.ticket for one in self._right.connector.poll()}
        self._left.connector.poll()

    def _next(self, session: int) -> bytes:
        draw = self._wrong.random
        data = self._wrong.next()
        try:
            value = msgspec.msgpack.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return data
        if not isinstance(value, list) or not value:
            return data
        if value[0] == "Bye" and draw.random() > SEND_BYE:
            value[0] = "Ping"
        if len(value) > 1 and draw.random() < 0.8:
            value[1] = session if value[0] != "Greeting" else value[1]
        if len(value) > 2 and self._open and draw.random() < 0.6:
            value[2] = draw.choice(sorted(self._open)) if value[0] != "Greeting" else value[2]
        return msgspec.msgpack.encode([value])

    def settle(self) -> None:
        """Nothing of it is left: all tickets ended, all slots free."""
        deadline = time.monotonic() + DEADLINE_S
        while self._open or self._right.connector.is_busy:
            assert time.monotonic() < deadline, f"tickets {self._open} do not end"
            self._turn()
