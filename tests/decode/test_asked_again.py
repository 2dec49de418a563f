"""A word between decode and prefill that is lost costs some time, and nothing else."""

import time

import pytest
from support.prefill_wire import NUM_TOKENS, confirmed, done, granted, meet, ready, settle_all

from decode import schedule
from decode.schedule import RequestState
from kvxfer.control.admission_messages import Granted, Starting
from kvxfer.control.messages import (
    Abort,
    Aborted,
    Confirmed,
    Done,
    Failed,
    FirstToken,
    PrefillRequest,
    Ready,
    Taken,
)
from kvxfer.control.resync_messages import GrantQuery, GrantUnknown

both_lanes = pytest.mark.parametrize("lane", ["push", "pull"])


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(schedule, "ASK_PAUSE_S", 0.1)
    monkeypatch.setattr(schedule, "ASK_PAUSE_MAX_S", 0.2)


LOST = [
    ("push", PrefillRequest),
    ("push", FirstToken),
    ("push", Done),
    ("pull", PrefillRequest),
    ("pull", FirstToken),
    ("pull", Ready),
    ("pull", Taken),
    ("pull", Confirmed),
]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("lane, kind", LOST, ids=lambda one: getattr(one, "__name__", one))
def test_a_lost_message_of_a_hand_over_is_made_up_for(cluster, losing, lane, kind, count):
    _, decode = cluster.pair(lane)
    left = losing(kind, count=count)
    sent = cluster.send(decode, num_tokens=19)
    cluster.finish(sent)
    sent.check_equal()
    more = cluster.send(decode)
    cluster.finish(more)
    more.check_equal()
    assert left[kind] == 0 or kind in (FirstToken, Taken, Confirmed, Done)
    cluster.until_idle()


@pytest.mark.parametrize("lane, kind", LOST, ids=lambda one: getattr(one, "__name__", one))
def test_a_message_that_comes_twice_changes_nothing(cluster, repeating, lane, kind):
    repeating(kind)
    prefill, decode = cluster.pair(lane, prefill={"kv_stream_bytes": 1})
    sent = [cluster.send(decode, num_tokens=n) for n in (3, 19)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    cluster.until_idle()
    assert len(prefill.peers.ready()) == len(decode.peers.ready()) == 1


@both_lanes
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", [PrefillRequest, Starting, Granted])
def test_a_lost_message_of_a_late_grant_is_made_up_for(cluster, losing, lane, kind, count):
    _, decode = cluster.pair(lane, engine={"bound": 16})
    sent = [cluster.send(decode, num_tokens=19)]
    left = losing(kind, count=count)
    sent += [cluster.send(decode, num_tokens=19) for _ in range(5)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    assert left[kind] == 0
    cluster.until_idle()


@both_lanes
@pytest.mark.parametrize("kind", [PrefillRequest, Starting, Granted])
def test_a_message_of_a_late_grant_that_comes_twice_changes_nothing(cluster, repeating, lane, kind):
    repeating(kind)
    prefill, decode = cluster.pair(lane)
    sent = [cluster.send(decode, num_tokens=19) for _ in range(6)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    cluster.until_idle()
    assert len(prefill.peers.ready()) == len(decode.peers.ready()) == 1


@pytest.mark.parametrize("is_called", [False, True])
def test_a_late_grant_that_prefill_never_heard_of_is_asked_for_again(cluster, is_called):
    wire, decode = meet(cluster, "push", engine={"bound": 16})
    for count in range(1, 7):
        cluster.send(decode, num_tokens=NUM_TOKENS)
        cluster.until(lambda: len(wire.of(PrefillRequest)) == count)  # noqa: B023
    last = wire.of(PrefillRequest)[-1]
    ids = last.request_id, last.grant.grant_id
    if is_called:
        wire.send(Starting(*ids))
        called = RequestState.CALLED, RequestState.GRANTED
        cluster.until(lambda: decode.role._requests[ids[0]].state in called)
    wire.send(GrantUnknown(*ids))
    cluster.until(lambda: len(wire.of(PrefillRequest)) == 7)
    again = wire.of(PrefillRequest)[-1]
    assert (again.request_id, again.grant.grant_id) == ids
    assert (again.grant.blocks is None) == (not wire.of(Granted))
    for one in wire.of(PrefillRequest):
        wire.send(Failed(one.request_id, one.grant.grant_id, "enough"))
    settle_all(cluster, wire)


@both_lanes
@pytest.mark.parametrize("kind", [Abort, Aborted])
def test_a_lost_end_of_what_was_given_up_is_made_up_for(cluster, losing, lane, kind):
    prefill, decode = cluster.pair(lane)
    prefill.runner.hold()
    sent = cluster.send(decode, num_tokens=17)
    cluster.until(lambda: prefill.role.status()["jobs"] == 1)
    losing(kind)
    cluster.router.cancel(sent.completion)
    cluster.finish(sent)
    prefill.runner.release()
    if lane == "push":
        cluster.until_idle()
        return
    cluster.until(lambda: decode.is_idle())  # nobody else writes: prefill's deadline ends its side


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Abort, Aborted])
def test_what_an_earlier_session_gave_up_is_asked_about_until_it_is_answered(cluster, losing, kind):
    """Blocks of all grants come back, though nobody was fenced."""
    prefill, decode = cluster.pair("push")
    prefill.runner.hold()
    sent = [cluster.send(decode, num_tokens=17) for _ in range(2)]
    cluster.until(lambda: prefill.role.status()["jobs"] == 2)
    left = losing(kind, count=7)
    for worker in (prefill, decode):
        worker.peers.lose(worker.peers.ready()[0].key, "the test says so")
    prefill.runner.release()
    cluster.finish(*sent)
    assert decode.pools.counts().quarantined > 0
    cluster.until_idle()
    assert left[kind] < 7, "some were lost; Failed may have come before all were"


@pytest.mark.slow
@both_lanes
@pytest.mark.parametrize("kind", [GrantQuery, GrantUnknown])
def test_a_grant_that_was_never_heard_of_is_found_out_whatever_is_lost(cluster, losing, lane, kind):
    _, decode = cluster.pair(lane)
    left = losing(PrefillRequest)
    losing(kind, count=3)
    sent = cluster.send(decode, num_tokens=17)
    cluster.finish(sent)
    sent.check_equal()
    assert left[kind] == left[PrefillRequest] == 0
    cluster.until_idle()


def test_silence_is_asked_about_later_and_later(cluster):
    wire, decode = meet(cluster, "push")
    sent, asked = granted(cluster, wire, decode)
    begun = time.monotonic()
    cluster.until(lambda: len(wire.of(GrantQuery)) == 4)
    assert time.monotonic() - begun > 0.5, "after 0.1, 0.2, 0.2 and 0.2 s"
    query = wire.of(GrantQuery)[0]
    assert (query.request_id, query.grant_id) == (asked.request_id, asked.grant.grant_id)
    wire.send(done(asked))
    cluster.finish(sent)
    asked_before = len(wire.of(GrantQuery))
    cluster.turn_for(0.3)
    assert len(wire.of(GrantQuery)) == asked_before
    settle_all(cluster, wire)


def test_taken_is_said_again_until_it_is_confirmed(cluster):
    wire, decode = meet(cluster, "pull")
    sent, asked = granted(cluster, wire, decode)
    wire.send(ready(asked))
    cluster.until(lambda: len(wire.of(Taken)) == 3)
    wire.send(confirmed(asked))
    cluster.finish(sent)
    settle_all(cluster, wire)


def test_a_grant_that_prefill_never_heard_of_is_told_again_as_it_was(cluster):
    wire, decode = meet(cluster, "push")
    sent, asked = granted(cluster, wire, decode)
    wire.send(GrantUnknown(asked.request_id, asked.grant.grant_id))
    cluster.until(lambda: len(wire.of(PrefillRequest)) == 2)
    again = wire.of(PrefillRequest)[1]
    assert again.grant.grant_id == asked.grant.grant_id
    assert again.grant.blocks == asked.grant.blocks
    assert again.grant.timeout_s <= asked.grant.timeout_s
    wire.send(GrantUnknown(asked.request_id, "0" * 16))
    cluster.turn_for(0.03)
    assert len(wire.of(PrefillRequest)) == 2
    cluster.router.cancel(sent.completion)
    settle_all(cluster, wire)
