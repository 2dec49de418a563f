"""A decode worker's requests: refused, cancelled in every state, failed, given up, late."""

import pytest
from support.workers import SPEC

from kvxfer.control.router_messages import Cancel, Generate, Sampling

both_lanes = pytest.mark.parametrize("lane", ["push", "pull"])

BAD_PROMPTS = [
    ({"tokens": []}, "at least one token"),
    ({"max_new_tokens": 0}, "at least one token"),
    ({"max_new_tokens": -3}, "at least one token"),
    ({"tokens": [97]}, "vocabulary of 97"),
    ({"tokens": [3, -1]}, "vocabulary of 97"),
    ({"num_tokens": 250, "max_new_tokens": 3}, "253 tokens: this worker holds 252"),
    ({"max_new_tokens": 1 << 62}, "this worker holds"),
]


@pytest.mark.parametrize("request_, reason", BAD_PROMPTS)
def test_a_prompt_that_cannot_be_served_is_refused_in_one_answer(cluster, request_, reason):
    _, decode = cluster.pair()
    if "num_tokens" in request_:
        request_ = {"tokens": [1] * request_["num_tokens"], **request_}
    sent = cluster.send(decode, **request_)
    cluster.finish(sent)
    assert sent.finished.reason == "refused"
    assert reason in sent.finished.error
    assert "\n" not in sent.finished.error
    cluster.until_idle()


BAD_SAMPLING = [
    Sampling(temperature=-1.0),
    Sampling(temperature=float("nan")),
    Sampling(top_p=0.0),
    Sampling(top_p=2.0),
    Sampling(seed=-1),
]


@both_lanes
@pytest.mark.parametrize("sampling", BAD_SAMPLING)
def test_bad_sampling_costs_the_request_and_no_peer(cluster, lane, sampling):
    prefill, decode = cluster.pair(lane)
    bad = cluster.send(decode, sampling=sampling)
    cluster.finish(bad)
    assert bad.finished.reason == "refused"
    assert len(prefill.peers.ready()) == len(decode.peers.ready()) == 1
    good = cluster.send(decode)
    cluster.finish(good)
    good.check_equal()
    cluster.until_idle()


def test_a_request_id_that_is_in_use_is_refused(cluster):
    _, decode = cluster.pair()
    decode.runner.hold()
    first = cluster.send(decode, request_id="same")
    cluster.until(lambda: decode.role.status()["requests"] == 1)
    second = cluster.send(decode, request_id="same")
    cluster.finish(second)
    assert "in use" in second.finished.error
    assert first.finished is None
    decode.runner.release()
    cluster.until_idle()


def hold_in(state, cluster, lane, prefill, decode):
    """Stop the pair so that a request sent now stays in `state`; returns the releases."""
    if state == "waiting":
        blocker = cluster.send(decode, num_tokens=26, max_new_tokens=2)
        decode.runner.hold()
        cluster.until(lambda: decode.pools.counts().used == 7)
        return blocker
    if state == "computing":
        prefill.runner.hold()
    elif state == "moving":
        mover = prefill if lane == "push" else decode
        mover.connector.moving.clear()
    else:
        decode.runner.hold()
    return None


def release_all(prefill, decode):
    for worker in (prefill, decode):
        worker.runner.release()
        worker.connector.moving.set()


def reached(state, lane, prefill, decode, sent):
    mover = prefill if lane == "push" else decode
    return {
        "waiting": lambda: decode.role.status()["requests"] == 2,
        "computing": lambda: prefill.role.status()["jobs"] == 1,
        "moving": lambda: mover.connector.num_submitted > 0,
        "digesting": lambda: len(sent.completion.output) == 1,
        "running": lambda: len(sent.completion.output) == 1,
    }[state]


STATES = ["waiting", "computing", "moving", "digesting", "running"]


@both_lanes
@pytest.mark.parametrize("state", STATES)
def test_cancel_in_every_state_leaves_nothing_behind(cluster, lane, state):
    prefill, decode = cluster.pair(lane, engine={"bound": 8})
    blocker = hold_in(state, cluster, lane, prefill, decode)
    sent = cluster.send(decode, num_tokens=17, max_new_tokens=8)
    cluster.until(reached(state, lane, prefill, decode, sent))
    cluster.router.cancel(sent.completion)
    cluster.router.cancel(sent.completion)
    cluster.turn_for(0.05)
    if state in ("waiting", "computing", "moving"):
        assert sent.finished is not None, "the client need not wait for the blocks"
    release_all(prefill, decode)
    cluster.finish(sent, *([blocker] if blocker else []))
    assert sent.finished.reason == "cancelled"
    after = cluster.send(decode, num_tokens=20)
    cluster.finish(after)
    after.check_equal()
    cluster.until_idle()


def test_a_stranger_cannot_cancel(cluster):
    prefill, decode = cluster.pair()
    prefill.runner.hold()
    sent = cluster.send(decode, request_id="mine")
    cluster.until(lambda: prefill.role.status()["jobs"] == 1)
    stranger = cluster.wire("prefill", worker_id="stranger")
    stranger.dial(decode)
    cluster.until(lambda: stranger.says(Cancel("mine")))
    cluster.turn_for(0.05)
    assert sent.finished is None
    prefill.runner.release()
    cluster.finish(sent)
    sent.check_equal()


@both_lanes
def test_the_same_id_may_be_sent_again_right_after_a_cancel(cluster, lane):
    """Whatever of the first is still under way must not be taken for the second's."""
    prefill, decode = cluster.pair(lane, on_peer_loss="exit")
    for turn in range(4):
        prefill.runner.hold()
        first = cluster.send(decode, num_tokens=17, request_id="same")
        cluster.until(lambda: prefill.role.status()["jobs"] == 1)
        cluster.router.cancel(first.completion)
        cluster.finish(first)
        second = cluster.send(decode, num_tokens=18 + turn, request_id="same")
        cluster.turn_for(0.02)
        prefill.runner.release()
        cluster.finish(second)
        assert second.finished.error == "" or "in use" in second.finished.error
        if not second.finished.error:
            second.check_equal()
        cluster.until_idle()
    assert prefill.peers.ready() and decode.peers.ready()


@both_lanes
def test_a_model_failure_in_prefill_ends_the_request_once(cluster, lane):
    prefill, decode = cluster.pair(lane)
    prefill.runner.fail_next = "no such luck"
    failed, good = cluster.send(decode, num_tokens=20), cluster.send(decode)
    cluster.finish(failed, good)
    assert failed.finished.reason == "error"
    assert "no such luck" in failed.finished.error
    good.check_equal()
    cluster.until_idle()


def test_a_model_failure_in_decode_ends_the_batch_and_nothing_else(cluster):
    _, decode = cluster.pair()
    one = cluster.send(decode, max_new_tokens=2)
    cluster.finish(one)
    failed = cluster.send(decode, max_new_tokens=40)
    cluster.until(lambda: len(failed.completion.output) > 2)
    decode.runner.fail_next = "out of tune"
    cluster.finish(failed)
    assert failed.finished.reason == "error"
    assert "out of tune" in failed.finished.error
    good = cluster.send(decode)
    cluster.finish(good)
    good.check_equal()
    cluster.until_idle()


def test_kv_that_is_not_finite_fails_its_own_request_and_the_batch_goes_on(cluster):
    _, decode = cluster.pair()
    sent = [cluster.send(decode, num_tokens=10, max_new_tokens=40) for _ in range(3)]
    cluster.until(lambda: 3 in decode.runner.batch_sizes)
    decode.runner.hold()
    poisoned = decode.role._requests[sent[1].completion.request_id]
    decode.cache.views[0][1][poisoned.blocks[0][1]] = float("nan")
    decode.runner.release()
    cluster.finish(*sent)
    assert sent[1].finished.reason == "error"
    assert "adds up to nan" in sent[1].finished.error
    assert 0 < len(sent[1].completion.output) < 40
    for one in (sent[0], sent[2]):
        one.check_equal()
    cluster.until_idle()


@both_lanes
def test_a_transport_that_refuses_fails_the_request_and_is_used_again(cluster, lane):
    prefill, decode = cluster.pair(lane)
    mover = prefill if lane == "push" else decode
    mover.connector.refuse.add("submit")
    failed = cluster.send(decode, num_tokens=20)
    cluster.finish(failed)
    assert failed.finished.reason == "error"
    assert "submit is refused" in failed.finished.error
    mover.connector.refuse.clear()
    good = cluster.send(decode)
    cluster.finish(good)
    good.check_equal()
    cluster.until_idle()


@both_lanes
@pytest.mark.parametrize("state", ["computing", "moving"])
def test_a_deadline_that_passes_is_an_error_and_blocks_wait_in_quarantine(cluster, lane, state):
    prefill, decode = cluster.pair(lane, decode={"request_timeout_s": 0.3})
    hold_in(state, cluster, lane, prefill, decode)
    sent = cluster.send(decode, num_tokens=17)
    cluster.until(reached(state, lane, prefill, decode, sent))
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    assert "deadline" in sent.finished.error
    written_by_others = lane == "push" or state == "moving"
    cluster.turn_for(0.05)
    if written_by_others:
        assert decode.pools.counts().quarantined == decode.cache.geometry.groups[0].spec.num_blocks(
            21
        )
    release_all(prefill, decode)
    cluster.until_idle()


def test_a_request_without_prefill_ends_at_its_deadline(cluster):
    decode = cluster.add("decode", request_timeout_s=0.2)
    sent = cluster.send(decode)
    cluster.finish(sent)
    assert "deadline passed in state WAITING" in sent.finished.error
    cluster.until_idle()


def test_a_request_for_an_absent_prefill_holds_up_nobody(cluster):
    _, decode = cluster.pair()
    cluster.connect_router(decode)
    backend = next(iter(cluster.router._backends.values()))
    message = Generate("for-nobody", [1, 2], 2, Sampling(), [], "elsewhere", False)
    cluster.router._channel.send(backend.key, message)
    cluster.until(lambda: decode.role.status()["requests"] == 1)
    sent = cluster.send(decode)
    cluster.finish(sent)
    sent.check_equal()


@both_lanes
def test_a_client_that_leaves_is_decoded_for_no_longer(cluster, lane):
    _, decode = cluster.pair(lane, decode={"peer_timeout_s": 30.0})
    cluster.send(decode, num_tokens=9, max_new_tokens=150)
    cluster.until(lambda: decode.runner.batch_sizes)
    cluster.router.close()
    cluster.router = None
    cluster.until_idle()
    assert len(decode.runner.batch_sizes) < 140


@both_lanes
def test_prefill_lost_while_it_works_fails_the_request(cluster, lane):
    prefill, decode = cluster.pair(lane)
    prefill.runner.hold()
    sent = cluster.send(decode, num_tokens=17)
    cluster.until(lambda: prefill.role.status()["jobs"] == 1)
    address = prefill.address
    cluster.remove(prefill)
    decode.peers.lose(next(iter(decode.peers.ready())).key, "the test says so")
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    held = decode.pools.counts().quarantined
    assert held == (SPEC.num_blocks(21) if lane == "push" else 0)
    cluster.add("prefill", lane=lane, listen=address)
    cluster.until_idle()  # the new process fences the old one off
    again = cluster.send(decode)
    cluster.finish(again)
    again.check_equal()


@both_lanes
@pytest.mark.parametrize("state", ["computing", "moving"])
def test_peers_that_lost_each_other_for_a_moment_leave_no_quarantine(cluster, lane, state):
    """The same two processes meet again: the blocks come back though nothing was fenced."""
    prefill, decode = cluster.pair(lane)
    hold_in(state, cluster, lane, prefill, decode)
    sent = cluster.send(decode, num_tokens=17)
    cluster.until(reached(state, lane, prefill, decode, sent))
    prefill.peers.lose(prefill.peers.ready()[0].key, "the test says so")
    decode.peers.lose(decode.peers.ready()[0].key, "the test says so")
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    release_all(prefill, decode)
    cluster.until(lambda: bool(prefill.peers.ready() and decode.peers.ready()))
    cluster.until_idle()
    again = cluster.send(decode)
    cluster.finish(again)
    again.check_equal()
