"""A prompt whose prefill worker dies or fails is prefilled elsewhere, or fails with a reason: never
a wrong token, never one twice, never a silent end."""

import pytest
from support.prefill_wire import FIRST, confirmed, done, first_token, granted, ready, settle_all
from support.workers import SPEC

from decode.schedule import RequestState
from kvxfer.control.admission_messages import Busy, Starting
from kvxfer.control.messages import Abort, Failed, Hello, PrefillRequest, Taken
from prefill.job import JobState

both_lanes = pytest.mark.parametrize("lane", ["push", "pull"])


def add_prefill(cluster, decode, lane, name="prefill-1", **options):
    known = len(decode.peers.ready())
    other = cluster.add("prefill", lane=lane, worker_id=name, **options)
    decode.peers.dial(other.address)
    cluster.until(lambda: len(decode.peers.ready()) == known + 1)
    return other


def held_pair(cluster, lane, **decode):
    """Two prefill workers, of which the first got a prompt that it does not finish."""
    first, receiver = cluster.pair(lane, decode=decode)
    second = add_prefill(cluster, receiver, lane)
    for worker in (first, second):
        worker.runner.hold()
    sent = cluster.send(receiver, num_tokens=17)
    cluster.until(lambda: first.role.status()["jobs"] + second.role.status()["jobs"] == 1)
    if second.role.status()["jobs"]:
        first, second = second, first
    second.runner.release()
    return first, second, receiver, sent


def lose(decode, worker):
    key = next(p.key for p in decode.peers.ready() if p.name == worker.options.worker_id)
    decode.peers.lose(key, "the test says so")


@both_lanes
def test_prefill_that_dies_is_replaced_by_another(cluster, lane):
    first, second, decode, sent = held_pair(cluster, lane)
    address = first.address
    cluster.remove(first)
    lose(decode, first)
    cluster.finish(sent)
    sent.check_equal()
    assert second.runner.num_chunks == 3
    held = decode.pools.counts().quarantined
    assert held == (SPEC.num_blocks(21) if lane == "push" else 0), "its writer is not fenced yet"
    cluster.add("prefill", lane=lane, listen=address, worker_id=first.options.worker_id)
    cluster.until_idle()


@both_lanes
def test_prefill_that_fails_is_replaced_by_another(cluster, lane):
    first, _, decode, sent = held_pair(cluster, lane)
    first.runner.fail_next = "no such luck"
    first.runner.release()
    cluster.finish(sent)
    sent.check_equal()
    cluster.until_idle()
    assert len(decode.peers.ready()) == 2


@both_lanes
def test_a_stopped_prefill_that_wakes_up_later_disturbs_nobody(cluster, lane):
    """It writes under the old grant: into blocks that are nobody else's."""
    first, _, decode, sent = held_pair(cluster, lane)
    cluster.workers.remove(first)
    lose(decode, first)
    cluster.finish(sent)
    more = [cluster.send(decode, num_tokens=18) for _ in range(4)]
    cluster.workers.append(first)
    first.runner.release()
    cluster.finish(*more)
    for one in (sent, *more):
        one.check_equal()
    cluster.until_idle()


@both_lanes
def test_all_that_fail_are_tried_once_and_then_the_reason_is_told(cluster, lane):
    first, second, _, sent = held_pair(cluster, lane)
    for worker in (first, second):
        worker.runner.fail_next = f"{worker.options.worker_id} is out of tune"
        worker.runner.release()
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    assert "is out of tune" in sent.finished.error
    assert sent.finished.num_tokens == 0
    cluster.until_idle()


def test_attempts_are_bounded(cluster):
    _, _, decode, sent = pair = held_pair(cluster, "push")
    others = [add_prefill(cluster, decode, "push", f"prefill-{i}") for i in (2, 3, 4)]
    workers = [*pair[:2], *others]
    for worker in workers:
        worker.runner.fail_next = "out of tune"
        worker.runner.release()
    cluster.finish(sent)
    assert "out of tune" in sent.finished.error
    assert sum(not worker.runner.fail_next for worker in workers) == 3
    cluster.until_idle()


def test_the_deadline_is_that_of_all_attempts(cluster):
    first, second, decode, sent = held_pair(cluster, "push", request_timeout_s=0.8)
    second.runner.hold()
    cluster.turn_for(0.3)
    lose(decode, first)
    cluster.until(lambda: second.role.status()["jobs"] == 1)
    (job,) = second.role._jobs.values()
    assert job.request.grant.timeout_s < 0.6
    cluster.finish(sent)
    assert "deadline" in sent.finished.error
    for worker in (first, second):
        worker.runner.release()
    cluster.until_idle()


def test_a_cancel_while_the_second_attempt_waits_for_blocks(cluster):
    """The first one's are in quarantine, and the pool has no others."""
    first, second, decode, sent = held_pair(cluster, "push", engine={"bound": 8})
    lose(decode, first)
    cluster.until(lambda: [j.state for j in second.role._jobs.values()] == [JobState.CALLED])
    cluster.turn_for(0.05)
    assert sent.finished is None
    cluster.router.cancel(sent.completion)
    cluster.finish(sent)
    assert sent.finished.reason == "cancelled"
    first.runner.release()
    cluster.until_idle()


# --- before there are blocks ----------------------------------------------------------------------


def queued_at_first(cluster, lane, state, **decode):
    """Of several prompts one that is in `state` at the first of two prefill workers, and both."""
    first, receiver = cluster.pair(lane, decode=decode)
    first.runner.hold()
    sent = [cluster.send(receiver, num_tokens=17) for _ in range(6)]
    role = receiver.role
    cluster.until(
        lambda: sum(one.state is not RequestState.WAITING for one in role._requests.values()) == 6
    )
    second = add_prefill(cluster, receiver, lane)
    cluster.until(lambda: any(one.state is state for one in role._requests.values()))
    name = next(one.request_id for one in role._requests.values() if one.state is state)
    return first, second, receiver, sent, name


STATES = pytest.mark.parametrize("state", [RequestState.ASKED, RequestState.CALLED])


@both_lanes
@STATES
def test_what_is_queued_at_a_prefill_that_is_lost_is_asked_of_another(cluster, lane, state):
    first, _, decode, sent, _ = queued_at_first(cluster, lane, state, engine={"bound": 14})
    lose(decode, first)
    first.runner.release()
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    cluster.until_idle()


@pytest.mark.parametrize("kind", [Busy, Failed])
@STATES
def test_what_a_prefill_gives_back_is_asked_of_another_or_ends(cluster, kind, state):
    wires, decode = add_wires(cluster, "push", engine={"bound": 14})
    sent = []
    for _ in range(8):
        sent.append(cluster.send(decode, num_tokens=17))
        cluster.until(lambda: sum(len(w.of(PrefillRequest)) for w in wires) == len(sent))
    asked = wires[0].of(PrefillRequest)[-1]
    assert asked.grant.blocks is None
    if state is RequestState.CALLED:
        wires[0].send(Starting(asked.request_id, asked.grant.grant_id))
        cluster.until(lambda: decode.role._requests[asked.request_id].state is state)
    used, known = decode.pools.counts().used, len(wires[1].of(PrefillRequest))
    end = 2.5 if kind is Busy else "out of luck"
    wires[0].send(kind(asked.request_id, asked.grant.grant_id, end))
    cluster.until(lambda: len(wires[1].of(PrefillRequest)) == known + 1)
    again = wires[1].of(PrefillRequest)[-1]
    assert again.request_id == asked.request_id
    assert again.grant.grant_id != asked.grant.grant_id
    assert (again.grant.blocks, decode.pools.counts().used) == (None, used)
    wires[1].send(kind(again.request_id, again.grant.grant_id, end))
    (one,) = [s for s in sent if s.completion.request_id == asked.request_id]
    cluster.finish(one)
    assert one.finished.reason == ("overloaded" if kind is Busy else "error")
    assert one.finished.retry_after_s == (2.5 if kind is Busy else 0.0)
    assert not any(a.grant_id == asked.grant.grant_id for w in wires for a in w.of(Abort))
    for wire in wires * 2:  # what fails at the first is asked of the other
        for request in wire.of(PrefillRequest):
            wire.send(Failed(request.request_id, request.grant.grant_id, "enough"))
        cluster.turn_for(0.05)
    settle_all(cluster, wires[0])


# --- after the first token was told ---------------------------------------------------------------


def add_wires(cluster, lane, **options):
    """Two prefill workers that the test plays, and decode."""
    wires = [
        cluster.wire("prefill", "tcp://127.0.0.1:0", lane=lane, worker_id=f"prefill-{i}")
        for i in range(2)
    ]
    decode = cluster.add("decode", lane=lane, **options)
    for count, wire in enumerate(wires, 1):
        decode.peers.dial(wire.address)
        cluster.until(lambda w=wire: bool(w.of(Hello)))
        wire.send(wire.welcome(lane))
        facts = wire.of(Hello)[0].facts.ranks[0]
        wire.connector.connect("decode", facts.base_address, facts.description)
        cluster.until(lambda n=count: len(decode.peers.ready()) == n)
    return wires, decode


def two_wires(cluster, lane):
    """The first of two prefill workers has told its first token and failed."""
    wires, decode = add_wires(cluster, lane)
    sent, asked = granted(cluster, wires[0], decode)
    wires[0].send(Failed(asked.request_id, asked.grant.grant_id, "out of luck"))
    cluster.until(lambda: bool(wires[1].of(PrefillRequest)))
    return sent, asked, wires[1], wires[1].of(PrefillRequest)[0], decode


@both_lanes
def test_the_second_attempt_has_a_grant_and_blocks_of_its_own(cluster, lane):
    sent, first, wire, second, _ = two_wires(cluster, lane)
    assert second.grant.grant_id != first.grant.grant_id
    assert second.request_id == first.request_id
    wire.send(first_token(second))
    if lane == "push":
        wire.send(done(second))
    else:
        wire.send(ready(second))
        cluster.until(lambda: bool(wire.of(Taken)))
        wire.send(confirmed(second))
    cluster.finish(sent)
    assert (sent.finished.reason, sent.finished.error) == ("length", "")
    assert sent.completion.output[0] == FIRST
    assert len(sent.completion.output) == sent.finished.num_tokens == 4
    settle_all(cluster, wire)


@both_lanes
def test_a_second_attempt_that_begins_otherwise_ends_in_an_error(cluster, lane):
    sent, _, wire, second, decode = two_wires(cluster, lane)
    wire.send(first_token(second, FIRST + 1))
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    assert "was sent, prefill-1 begins with" in sent.finished.error
    assert sent.completion.output == [FIRST]
    assert len(decode.peers.ready()) == 2, "that is no wrong of the peer's"
    cluster.until(lambda: bool(wire.of(Abort)))
    settle_all(cluster, wire)


def test_a_done_that_begins_otherwise_ends_in_an_error(cluster):
    sent, _, wire, second, decode = two_wires(cluster, "push")
    wire.send(done(second, first_token=FIRST + 1))
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    assert (sent.completion.output, decode.runner.batch_sizes) == ([FIRST], [])
    settle_all(cluster, wire)
