"""Decode's side of admission: blocks bound late, queues that are bounded, peers that are slow."""

import time

import pytest
from support.prefill_wire import NUM_TOKENS, done, first_token, meet, settle_all
from support.workers import SPEC

from kvxfer.control.admission_messages import Busy, Granted, Starting
from kvxfer.control.messages import Abort, Aborted, Failed, PrefillRequest
from kvxfer.worker.admission import GRANTS_AHEAD

both_lanes = pytest.mark.parametrize("lane", ["push", "pull"])
BLOCKS_EACH = SPEC.num_blocks(NUM_TOKENS + 4)


def queue_up(cluster, wire, decode, count):
    """So many requests at a prefill worker that says nothing; returns (sent, PrefillRequests)."""
    known = len(wire.of(PrefillRequest))
    sent = [cluster.send(decode, num_tokens=NUM_TOKENS) for _ in range(count)]
    cluster.until(lambda: len(wire.of(PrefillRequest)) == known + count)
    return sent, wire.of(PrefillRequest)[known:]


def test_a_long_queue_at_prefill_holds_no_blocks_of_decode(cluster):
    wire, decode = meet(cluster, "push")
    _, asked = queue_up(cluster, wire, decode, 12)
    assert [one.grant.blocks is not None for one in asked] == [i < GRANTS_AHEAD for i in range(12)]
    assert decode.pools.counts().used == GRANTS_AHEAD * BLOCKS_EACH
    last = asked[-1]
    wire.send(Starting(last.request_id, last.grant.grant_id))
    cluster.until(lambda: bool(wire.of(Granted)))
    (granted,) = wire.of(Granted)
    assert (granted.request_id, granted.grant_id) == (last.request_id, last.grant.grant_id)
    assert decode.pools.counts().used == (GRANTS_AHEAD + 1) * BLOCKS_EACH
    for one in asked:
        wire.send(Failed(one.request_id, one.grant.grant_id, "enough"))
    settle_all(cluster, wire)


def test_a_request_behind_none_is_granted_at_once(cluster):
    wire, decode = meet(cluster, "push")
    for turn in range(4):
        _, (asked,) = queue_up(cluster, wire, decode, 1)
        assert asked.grant.blocks is not None, f"turn {turn}"
        wire.send(Failed(asked.request_id, asked.grant.grant_id, "enough"))
        cluster.until_idle()


def test_those_that_are_called_get_blocks_in_the_order_of_the_calls(cluster):
    """Two fit at a time; a call that finds no blocks waits and is not overtaken."""
    wire, decode = meet(cluster, "push", engine={"bound": 1 + 2 * BLOCKS_EACH})
    sent, asked = queue_up(cluster, wire, decode, 5)
    order = [asked[4], asked[2], asked[3]]
    for one in order:
        wire.send(Starting(one.request_id, one.grant.grant_id))
    cluster.turn_for(0.05)
    assert wire.of(Granted) == []
    for index, holder in enumerate([*asked[:2], order[0]]):
        wire.send(Failed(holder.request_id, holder.grant.grant_id, "enough"))
        cluster.until(lambda: len(wire.of(Granted)) == index + 1)  # noqa: B023
    assert [one.request_id for one in wire.of(Granted)] == [one.request_id for one in order]
    for one in order[1:]:
        wire.send(Failed(one.request_id, one.grant.grant_id, "enough"))
    cluster.finish(*sent)
    settle_all(cluster, wire)


@pytest.mark.parametrize("state", ["asked", "called"])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_what_ends_before_it_has_blocks_is_over_at_once_and_prefill_hears_of_it(
    cluster, state, how
):
    timeout_s = 0.4 if how == "deadline" else 60.0
    bound = 1 + GRANTS_AHEAD * BLOCKS_EACH
    wire, decode = meet(cluster, "push", engine={"bound": bound}, request_timeout_s=timeout_s)
    sent, asked = queue_up(cluster, wire, decode, GRANTS_AHEAD + 1)
    last = asked[-1]
    if state == "called":
        wire.send(Starting(last.request_id, last.grant.grant_id))
        cluster.turn_for(0.02)
    if how == "cancel":
        cluster.router.cancel(sent[-1].completion)
    cluster.finish(sent[-1])
    assert wire.of(Granted) == []
    cluster.until(lambda: any(a.grant_id == last.grant.grant_id for a in wire.of(Abort)))
    if how == "deadline":
        assert f"state {state.upper()}" in sent[-1].finished.error
    wire.send(Starting(last.request_id, last.grant.grant_id))  # it crossed the Abort
    wire.send(Aborted(last.request_id, last.grant.grant_id))
    for one in asked[:-1]:
        wire.send(Failed(one.request_id, one.grant.grant_id, "enough"))
    settle_all(cluster, wire)


def test_a_call_for_what_is_over_is_answered_with_its_end(cluster):
    wire, decode = meet(cluster, "push")
    wire.send(Starting("long-gone", "grant"))
    cluster.until(lambda: bool(wire.of(Abort)))
    assert wire.of(Abort)[0].grant_id == "grant"
    assert decode.peers.ready()


def test_calls_that_come_again_are_answered_with_the_same_blocks(cluster):
    wire, decode = meet(cluster, "push")
    _, asked = queue_up(cluster, wire, decode, GRANTS_AHEAD + 1)
    before = decode.pools.counts().used
    last = asked[-1]
    for count in (1, 2, 3):
        wire.send(Starting(last.request_id, last.grant.grant_id))
        cluster.until(lambda: len(wire.of(Granted)) == count)  # noqa: B023
    first = wire.of(Granted)[0]
    assert wire.of(Granted) == [first] * 3
    assert decode.pools.counts().used == before + BLOCKS_EACH
    for one in asked:
        wire.send(Failed(one.request_id, one.grant.grant_id, "enough"))
    settle_all(cluster, wire)


def test_one_more_than_the_queue_takes_is_told_when_to_come_back(cluster):
    wire, decode = meet(cluster, "push", max_num_queued_seqs=3)
    sent, asked = queue_up(cluster, wire, decode, GRANTS_AHEAD + 3)
    before = decode.pools.counts()
    surplus = cluster.send(decode, num_tokens=NUM_TOKENS)
    cluster.finish(surplus)
    assert surplus.finished.reason == "overloaded"
    assert 0 < surplus.finished.retry_after_s <= 60
    assert "queue is full: try again in" in surplus.finished.error
    assert decode.pools.counts() == before
    assert decode.role.status()["requests"] == GRANTS_AHEAD + 3
    assert len(wire.of(PrefillRequest)) == GRANTS_AHEAD + 3
    for one in asked:
        wire.send(Failed(one.request_id, one.grant.grant_id, "enough"))
    cluster.finish(*sent)
    cluster.until_idle()
    queue_up(cluster, wire, decode, 1)  # there is room again


@pytest.mark.parametrize("seconds, told", [(0.25, 0.25), (-1.0, 0.0), (float("nan"), 0.0)])
@pytest.mark.parametrize("has_blocks", [True, False])
def test_a_busy_prefill_ends_the_request_as_overloaded(cluster, has_blocks, seconds, told):
    wire, decode = meet(cluster, "push")
    sent, asked = queue_up(cluster, wire, decode, 1 if has_blocks else GRANTS_AHEAD + 1)
    last = asked[-1]
    wire.send(Busy(last.request_id, last.grant.grant_id, seconds))
    cluster.finish(sent[-1])
    assert sent[-1].finished.reason == "overloaded"
    assert sent[-1].finished.retry_after_s == told
    assert not any(abort.grant_id == last.grant.grant_id for abort in wire.of(Abort))
    for one in asked[:-1]:
        wire.send(Failed(one.request_id, one.grant.grant_id, "enough"))
    settle_all(cluster, wire)


@both_lanes
def test_a_flood_is_served_or_told_to_come_back_and_nothing_leaks(cluster, lane):
    _, decode = cluster.pair(lane, max_num_queued_seqs=10)
    sent = [cluster.send(decode, num_tokens=5 + i % 9, max_new_tokens=2) for i in range(60)]
    cluster.finish(*sent)
    reasons = [one.finished.reason for one in sent]
    assert set(reasons) == {"length", "overloaded"}
    for one in sent:
        if one.finished.reason == "length":
            one.check_equal()
    cluster.until_idle()


@both_lanes
@pytest.mark.parametrize("stops", ["control", "data"])
def test_a_slow_decode_worker_holds_up_no_other(cluster, lane, stops):
    """Two decode workers of one prefill. One of them, with a long queue, stops: its control thread
    reads nothing any more, or its transfers never end. The other is served as before."""
    prefill, slow = cluster.pair(lane)
    other = cluster.add("decode", lane=lane, worker_id="decode-1")
    other.peers.dial(prefill.address)
    cluster.until(lambda: len(prefill.peers.ready()) == 2 and bool(other.peers.ready()))
    quick = _rate(cluster, other)
    mover = prefill if lane == "push" else slow
    cluster.router.close()
    cluster.router = None
    if stops == "data" and lane == "pull":
        mover.connector.moving.clear()
    for _ in range(30):
        cluster.send(slow, num_tokens=12)
    cluster.until(lambda: prefill.role.status()["jobs"] > 4)
    if stops == "control" or lane == "push":  # prefill's own writes are for both
        cluster.workers.remove(slow)
    cluster.router.close()
    cluster.router = None
    assert _rate(cluster, other) < 4 * quick + 0.2
    if slow not in cluster.workers:
        cluster.workers.append(slow)
    slow.connector.moving.set()
    cluster.until_idle()


def _rate(cluster, decode, count=8):
    """Seconds that so many requests take, one after the other."""
    cluster.connect_router(decode)
    start = time.monotonic()
    for _ in range(count):
        sent = cluster.send(decode, num_tokens=9, max_new_tokens=1)
        cluster.finish(sent)
        sent.check_equal()
    return time.monotonic() - start


def test_the_wire_of_these_tests_can_serve_one(cluster):
    """So that what they refuse to serve is refused for what they say."""
    wire, decode = meet(cluster, "push")
    sent, asked = queue_up(cluster, wire, decode, GRANTS_AHEAD + 1)
    last = asked[-1]
    wire.send(Starting(last.request_id, last.grant.grant_id))
    cluster.until(lambda: bool(wire.of(Granted)))
    wire.send(first_token(last))
    wire.send(done(last))
    cluster.until(lambda: len(sent[-1].completion.output) > 1)
    for one in asked[:-1]:
        wire.send(Failed(one.request_id, one.grant.grant_id, "enough"))
    settle_all(cluster, wire)
