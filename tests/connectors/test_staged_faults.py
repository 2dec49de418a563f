"""The staged way in one process: many tickets, and what peers may do wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.staged_sides import (
    KIB,
    MIB,
    NUM_SLOTS,
    RING_BYTES,
    SOME,
    WHOLE,
    WINDOW_BYTES,
    Side,
    check_slots_are_free,
    collect,
    fill,
    plan_of,
    talking,
    until,
)

from connectors import staged_engine, staged_target
from connectors.peer_copy import Copier
from connectors.staged_messages import (
    Ask,
    Bye,
    Greeting,
    Landed,
    Piece,
    Return,
    WireNest,
    Written,
    encode,
)
from connectors.staged_ring import STAGING_BYTES
from kvxfer.errors import ConnectorError
from kvxfer.transfer.connector import Direction


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAGING_BYTES, str(RING_BYTES))


@pytest.fixture
def sides(small_ring: None) -> Iterator[list[Side]]:
    made = [Side.make(name) for name in ("left", "right", "third")]
    fill(*(side.bytes for side in made))
    yield made
    for side in made:
        side.connector.close()


@pytest.fixture
def tiny_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAGING_BYTES, str(2 * NUM_SLOTS * 8 * KIB))


def test_many_tickets_at_once_share_the_slots(tiny_ring: None, sides: list[Side]) -> None:
    left, right, third = sides
    for one in sides:
        for other in sides:
            if one is not other:
                one.meet(other)
    size = 5 * 8 * KIB
    wanted = [side.bytes.copy() for side in sides]
    started: dict[str, set[int]] = {side.name: set() for side in sides}
    pairs = [(left, right), (right, left), (third, left), (right, third)] * 10
    for index, (mover, other) in enumerate(pairs):
        direction = Direction.PUSH if index % 3 else Direction.PULL
        source, target = (mover, other) if direction is Direction.PUSH else (other, mover)
        origin, to = index * size, WINDOW_BYTES // 2 + index * size
        plan = plan_of((origin, to, size))
        started[mover.name].add(mover.connector.submit(other.name, direction, plan))
        wanted[sides.index(target)][to : to + size] = source.bytes[origin : origin + size]
    ended: dict[str, dict[int, str | None]] = {side.name: {} for side in sides}

    def have_all_ended() -> bool:
        for side in sides:
            ended[side.name] |= {one.ticket: one.error for one in side.connector.poll()}
        return all(len(ended[name]) == len(tickets) for name, tickets in started.items())

    until(have_all_ended)
    assert {error for results in ended.values() for error in results.values()} == {None}
    for side, after in zip(sides, wanted, strict=True):
        np.testing.assert_array_equal(side.bytes, after)
        check_slots_are_free(side.connector)


def test_garbage_fails_its_senders_tickets_and_nothing_else(sides: list[Side]) -> None:
    """And whatever is wrong in a message, no byte of the cache changes."""
    left, right, third = sides
    agent, link = talking(left, right)
    right.meet(left)
    right.meet(third)
    before = right.bytes.copy()
    here = (WireNest(np.zeros(1, np.int64).tobytes(), (), (), 64),)
    session = link.remote_session or 0
    for message in (
        b"",
        os.urandom(200),
        encode(Written(session, 1, 3)),
        encode(Piece(session, 1, 3, 64, here)),
        encode(Return(session, 1, 3)),
        encode(Landed(session, 1, 3)),
        encode(Ask(session, 1, NUM_SLOTS, 64, here)),
        encode(Ask(session, 1, 0, 64, here)) + b"x",
        encode(Greeting(5, 6, b"no ring")),
    ):
        ours = right.connector.submit("left", Direction.PULL, plan_of((0, 0, 64)))
        others = right.connector.submit("third", Direction.PULL, plan_of((0, 64, 64)))
        agent.notify(right.connector._name, message)
        ended = collect(right, {ours, others}, third)
        assert ended[others] is None
        before[64:128] = third.bytes[:64]
        assert "refused" in str(ended[ours]), message
        until(lambda: not right.connector.is_busy, left.connector, right.connector)
    np.testing.assert_array_equal(right.bytes, before)
    check_slots_are_free(right.connector)
    ticket = right.connector.submit("left", Direction.PULL, SOME)
    assert collect(right, {ticket}, left) == {ticket: None}


def test_greetings_that_cross_end_in_one_session(sides: list[Side]) -> None:
    """Not in each side's taking every answer of the other's for a beginning, for ever."""
    left, right, _ = sides
    agent, link = talking(left, right)
    right.meet(left)
    until(lambda: not link.unsent, left.connector, right.connector)
    engine = left.connector._engine
    agent.notify(right.connector._name, encode(Bye(link.remote_session or 0)))
    engine.links.greet(link)  # of the session that is over
    for _ in range(50):
        for side in (left, right):
            side.connector.poll()
        time.sleep(0.001)
    known = right.connector._engine.links.find(left.connector._name)
    before = link.session, known.session
    for _ in range(50):
        for side in (left, right):
            side.connector.poll()
        time.sleep(0.001)
    assert (link.session, known.session) == before
    assert (link.remote_session, known.remote_session) == (known.session, link.session)
    for direction in Direction:
        ticket = right.connector.submit("left", direction, SOME)
        assert collect(right, {ticket}, left) == {ticket: None}


def test_a_region_revoked_between_request_and_gather(sides: list[Side]) -> None:
    left, right, _ = sides
    talking(left, right)
    before = left.bytes.copy()
    ticket = left.connector.submit("right", Direction.PULL, SOME)
    left.connector.poll()
    right.connector.deregister([WHOLE])
    right.bytes[:] = 0
    error = collect(left, {ticket}, right)[ticket]
    assert error is not None and "source" in error and "no registered region" in error
    np.testing.assert_array_equal(left.bytes, before)
    check_slots_are_free(left.connector)


def test_a_piece_that_comes_long_after_its_grant_is_not_scattered(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right, _ = sides
    talking(left, right)
    monkeypatch.setattr(staged_target, "LEASE_S", -1.0)
    before = right.bytes.copy()
    ticket = left.connector.submit("right", Direction.PUSH, SOME)
    assert "after its grant" in str(collect(left, {ticket}, right)[ticket])
    np.testing.assert_array_equal(right.bytes, before)
    for side in (left, right):
        check_slots_are_free(side.connector)


@pytest.mark.parametrize("direction", Direction)
def test_one_side_closes(sides: list[Side], direction: Direction) -> None:
    left, right, _ = sides
    talking(left, right)
    ticket = left.connector.submit("right", direction, SOME)
    for _ in range(2):
        left.connector.poll()
    right.connector.close()
    until_error = collect(left, {ticket})[ticket]
    assert until_error is not None
    check_slots_are_free(left.connector)


class SlowCopier:
    """A copier that ends nothing for as many turns as it is told."""

    def __init__(self, really: Copier) -> None:
        self._really = really
        self.turns_left = 1 << 30
        self.place = really.place
        self.start = really.start

    def begin_turn(self) -> None:
        self._really.begin_turn()
        self.turns_left = max(0, self.turns_left - 1)

    def is_finished(self, copy: Any) -> bool:
        return not self.turns_left and self._really.is_finished(copy)


def test_copies_of_a_region_end_before_it_is_deregistered(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right, _ = sides
    talking(left, right)
    copier = SlowCopier(right.connector._engine.site.copier)
    monkeypatch.setattr(right.connector._engine.site, "copier", copier)
    ticket = left.connector.submit("right", Direction.PULL, SOME)
    until(lambda: bool(right.connector._engine.source.copying()), left.connector, right.connector)
    with monkeypatch.context() as patch:
        patch.setattr(staged_engine, "SETTLE_TIMEOUT_S", -1.0)
        with pytest.raises(ConnectorError, match="copies did not end"):
            right.connector.deregister([WHOLE])
    right.connector.register([WHOLE])
    copier.turns_left = 3
    right.connector.deregister([WHOLE])
    assert copier.turns_left == 0 and not right.connector._engine.source.copying()
    wanted = right.bytes[: 300 * KIB].copy()
    right.bytes[:] = 0  # it may be unmapped now
    assert collect(left, {ticket}, right) == {ticket: None}
    np.testing.assert_array_equal(left.bytes[MIB : MIB + 300 * KIB], wanted)
