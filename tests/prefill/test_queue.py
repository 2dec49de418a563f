"""Prefill's queue: bounded, each decode worker in its turn, grants named when a turn is near."""

import pytest
from support.decode_wire import GRANTED, TOKENS, greet, meet, settled

from kvxfer.control.admission_messages import Busy, Granted, Starting
from kvxfer.control.messages import Abort, Aborted, Done, Failed, Grant, PrefillRequest
from kvxfer.control.resync_messages import GrantQuery, GrantUnknown
from kvxfer.control.router_messages import Sampling
from kvxfer.control.session import Peer
from kvxfer.worker.admission import GRANTS_AHEAD
from prefill.job import JobState, PrefillJob
from prefill.queue import MAX_UNFINISHED, JobQueue


def job(peer="one", name="r", blocks=None):
    request = PrefillRequest(name, [1], Sampling(), Grant(f"{peer}-{name}", blocks, 9.0, 0), False)
    return PrefillJob(request, Peer(peer, 0.0), deadline_s=0.0)


def fill(queue, peer, count, blocks=None):
    jobs = [job(peer, str(index), blocks) for index in range(count)]
    for one in jobs:
        queue.add(one)
    return jobs


def test_each_decode_worker_has_its_turn_whatever_another_has_queued():
    queue = JobQueue(100)
    many, few = fill(queue, "many", 50, [[1]]), fill(queue, "few", 3, [[1]])
    started = []
    for _ in range(6):
        started.append(queue.next())
        queue.start(started[-1])
    assert started[::2] == many[:3]
    assert started[1::2] == few
    assert len(queue) == 47


def test_only_the_next_few_are_called_and_those_without_blocks_are_passed_over():
    queue = JobQueue(100)
    silent, other = fill(queue, "silent", 5), fill(queue, "other", 5)
    called = queue.to_call()
    assert called == silent[:GRANTS_AHEAD] + other[:GRANTS_AHEAD]
    assert queue.to_call() == []
    assert queue.next() is None
    other[0].bind([[1]], 0)
    assert queue.next() is other[0]
    queue.start(other[0])
    assert queue.to_call() == [other[GRANTS_AHEAD]]


def test_what_comes_with_blocks_goes_ahead_of_those_that_may_wait_for_them():
    queue = JobQueue(100)
    late = fill(queue, "one", GRANTS_AHEAD + 1)
    assert queue.to_call() == late[:GRANTS_AHEAD]
    early = [job("one", name, [[1]]) for name in ("a", "b")]
    for one in early:
        queue.add(one)
    for one in early:
        assert queue.next() is one
        queue.start(one)
    late[0].bind([[1]], 0)
    assert queue.next() is late[0]
    assert len(queue) == len(late)


def test_who_hands_over_slowly_starts_no_more_until_some_have_ended():
    queue = JobQueue(100)
    slow = fill(queue, "slow", MAX_UNFINISHED + 2, [[1]])
    for _ in range(MAX_UNFINISHED):
        queue.start(queue.next())
    assert queue.next() is None
    (other,) = fill(queue, "other", 1, [[1]])
    assert queue.next() is other
    queue.finish(slow[0])
    assert queue.next() is slow[MAX_UNFINISHED]


def test_a_full_queue_is_one_decode_workers_and_removal_makes_room():
    queue = JobQueue(2)
    jobs = fill(queue, "full", 2)
    assert (queue.is_full("full"), queue.is_full("other")) == (True, False)
    queue.remove(jobs[0])
    queue.remove(jobs[0])
    assert (queue.is_full("full"), len(queue)) == (False, 1)


# --- the worker -----------------------------------------------------------------------------------


def ask_late(wire, name, timeout_s=30.0, tokens=TOKENS):
    """A PrefillRequest without blocks; returns its ids."""
    grant = Grant(f"grant-{name}", None, timeout_s, 0)
    wire.send(PrefillRequest(name, list(tokens), Sampling(), grant, False))
    return name, grant.grant_id


def test_blocks_are_asked_for_when_the_turn_is_near_and_not_before(cluster):
    prefill, wire = meet(cluster, "push")
    prefill.runner.hold()
    asked = [ask_late(wire, str(index)) for index in range(5)]
    cluster.until(lambda: len(wire.of(Starting)) == GRANTS_AHEAD)
    cluster.turn_for(0.05)
    assert [(s.request_id, s.grant_id) for s in wire.of(Starting)] == asked[:GRANTS_AHEAD]
    assert prefill.pools.counts().used == 0
    prefill.runner.release()
    for index, (name, grant_id) in enumerate(asked):
        cluster.until(lambda: len(wire.of(Starting)) > index)  # noqa: B023
        wire.send(Granted(name, grant_id, GRANTED, 0))
    cluster.until(lambda: len(wire.of(Done)) == 5)
    assert [done.request_id for done in wire.of(Done)] == [name for name, _ in asked]
    settled(cluster, prefill)


def test_a_grant_that_does_not_come_lets_another_decode_worker_go_first(cluster):
    prefill, silent = meet(cluster, "push")
    wire = cluster.wire("decode", lane="push", worker_id="decode-1")
    wire.dial(prefill)
    greet(cluster, wire)
    for index in range(20):
        ask_late(silent, str(index), timeout_s=2.0)
    cluster.until(lambda: bool(silent.of(Starting)))
    for index in range(10):
        name, grant_id = ask_late(wire, f"quick-{index}")
        cluster.until(lambda: len(wire.of(Starting)) > index)  # noqa: B023
        wire.send(Granted(name, grant_id, GRANTED, 0))
        cluster.until(lambda: len(wire.of(Done)) > index, 1.0)  # noqa: B023
    assert len(silent.of(Starting)) == GRANTS_AHEAD
    cluster.until(lambda: len(silent.of(Failed)) == 20)
    assert {failed.reason.rpartition(" ")[2] for failed in silent.of(Failed)} <= {
        "CALLED",
        "QUEUED",
    }
    settled(cluster, prefill)


def test_a_full_queue_answers_busy_with_an_estimate_and_changes_nothing(cluster):
    prefill, wire = meet(cluster, "push", max_num_queued_seqs=3)
    ids = [ask_late(wire, str(index)) for index in range(3)]
    cluster.until(lambda: prefill.role.status()["queued"] == 3)
    name, grant_id = ask_late(wire, "surplus")
    cluster.until(lambda: bool(wire.of(Busy)))
    (busy,) = wire.of(Busy)
    assert (busy.request_id, busy.grant_id) == (name, grant_id)
    assert 0 < busy.retry_after_s < 30
    assert prefill.role.status()["jobs"] == 3
    for one, grant in ids:
        wire.send(Abort(one, grant, "enough"))
    cluster.until(lambda: len(wire.of(Aborted)) == 3)
    ask_late(wire, "surplus")  # the grant is over; what was refused may be asked with another
    cluster.until(lambda: len(wire.of(Busy)) == 2)
    assert wire.of(Busy)[1] == busy
    again = ask_late(wire, "again")
    cluster.until(lambda: wire.of(Starting)[-1].request_id == "again")
    wire.send(Granted(*again, GRANTED, 0))
    cluster.until(lambda: bool(wire.of(Done)))
    settled(cluster, prefill)


@pytest.mark.parametrize("blocks", [[], [[0, 1, 2, 3, 4]], [[1, 2, 3, 4, 64]], [[1, 1, 2, 3, 4]]])
def test_blocks_that_decode_cannot_mean_fail_the_request_alone(cluster, blocks):
    prefill, wire = meet(cluster, "push")
    name, grant_id = ask_late(wire, "bad")
    cluster.until(lambda: bool(wire.of(Starting)))
    wire.send(Granted(name, grant_id, blocks, 0))
    cluster.until(lambda: bool(wire.of(Failed)))
    assert wire.of(Failed)[0].reason.startswith("grant: ")
    assert prefill.peers.ready()
    settled(cluster, prefill)


def test_words_of_a_late_grant_that_come_again_change_nothing(cluster):
    prefill, wire = meet(cluster, "push")
    prefill.runner.hold()
    names = [ask_late(wire, str(index)) for index in range(GRANTS_AHEAD + 1)]
    cluster.until(lambda: len(wire.of(Starting)) == GRANTS_AHEAD)
    for one in names:
        ask_late(wire, one[0])
        wire.send(GrantQuery(*one, 0, [], 0))
    cluster.until(lambda: len(wire.of(Starting)) == 2 * GRANTS_AHEAD)
    cluster.turn_for(0.05)
    called = [(one.request_id, one.grant_id) for one in wire.of(Starting)]
    assert sorted(called) == sorted(names[:GRANTS_AHEAD] * 2), "none that is queued is called"
    assert prefill.role.status()["jobs"] == len(names)
    for _ in range(2):
        wire.send(Granted(*names[0], GRANTED, 0))
    prefill.runner.release()
    cluster.until(lambda: bool(wire.of(Done)))
    wire.send(Granted(*names[0], GRANTED, 0))
    cluster.until(lambda: len(wire.of(Done)) == 2)
    assert wire.of(Done)[1] == wire.of(Done)[0]
    assert wire.of(GrantUnknown) == []
    for one in names[1:]:
        wire.send(Abort(*one, "enough"))
    settled(cluster, prefill)


def test_other_blocks_for_the_same_grant_cost_the_session(cluster):
    prefill, wire = meet(cluster, "push")
    prefill.runner.hold()
    one = ask_late(wire, "one")
    cluster.until(lambda: bool(wire.of(Starting)))
    wire.send(Granted(*one, GRANTED, 0))
    wire.send(Granted(*one, [GRANTED[0][::-1]], 0))
    cluster.until(lambda: not prefill.peers.ready())
    prefill.runner.release()
    settled(cluster, prefill)


def test_blocks_that_nobody_asked_for_cost_the_session(cluster):
    prefill, wire = meet(cluster, "push")
    prefill.runner.hold()
    for index in range(GRANTS_AHEAD + 1):
        ask_late(wire, str(index))
    cluster.until(lambda: len(wire.of(Starting)) == GRANTS_AHEAD)
    last = GRANTS_AHEAD
    wire.send(Granted(str(last), f"grant-{last}", GRANTED, 0))
    cluster.until(lambda: not prefill.peers.ready())
    prefill.runner.release()
    settled(cluster, prefill)


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.CALLED, JobState.WAITING])
def test_what_is_given_up_before_it_starts_is_gone_at_once(cluster, state):
    prefill, wire = meet(cluster, "push")
    prefill.runner.hold()
    names = [ask_late(wire, str(index)) for index in range(GRANTS_AHEAD + 2)]
    cluster.until(lambda: len(wire.of(Starting)) == GRANTS_AHEAD)
    wire.send(Granted(*names[0], GRANTED, 0))
    cluster.until(lambda: len(wire.of(Starting)) == GRANTS_AHEAD + 1)
    if state is JobState.WAITING:
        wire.send(Granted(*names[1], GRANTED, 0))
    given_up = names[-1] if state is JobState.QUEUED else names[1]
    cluster.until(lambda: prefill.role._jobs[(wire_key(prefill), given_up[1])].state is state)
    wire.send(Abort(*given_up, "enough"))
    cluster.until(lambda: bool(wire.of(Aborted)))
    assert wire.of(Aborted)[0].grant_id == given_up[1]
    wire.send(Granted(*given_up, GRANTED, 0))  # it crossed the Aborted: nothing comes of it
    for one in names:
        if one != given_up:
            wire.send(Abort(*one, "enough"))
    prefill.runner.release()
    settled(cluster, prefill)


def wire_key(prefill):
    return prefill.peers.ready()[0].key
