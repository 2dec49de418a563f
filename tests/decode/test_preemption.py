"""Sequences that grow take the blocks of those who came after them, which lose nothing by it."""

from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cluster import Cluster
from support.prefill_wire import meet, settle_all
from support.workers import SPEC

from decode.admission import choose_prefill
from decode.schedule import DecodeRequest, RequestState
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.control.admission_messages import Busy
from kvxfer.control.messages import Abort, Done, Failed, FirstToken, PrefillRequest
from kvxfer.control.router_messages import Generate, Sampling, TransferStats

both_lanes = pytest.mark.parametrize("lane", ["push", "pull"])
SLIDING = KVCacheSpec(3, 1, 8, 24, "float32", 4, GroupKind.SLIDING, 10)
LATENT = KVCacheSpec(2, 1, 24, 8, "float32", 4, GroupKind.MLA)
CROSS = KVCacheSpec(2, 2, 16, 16, "float32", 4, GroupKind.CROSS)
SMALL = {"engine": {"bound": 17}}
"""16 blocks of 4 tokens."""


def tight_pair(cluster, lane="push", bound=17, **decode):
    """A prefill worker with plenty of blocks, and a decode worker with few."""
    return cluster.pair(lane, decode={"engine": {"bound": bound}, **decode})


def preemptions(decode):
    return decode.role.status()["preemptions"]


def num_filled(decode):
    """Requests whose prompt is here: they run, or will from the next step on."""
    filled = (RequestState.FILLED, RequestState.RUNNING)
    return sum(request.state in filled for request in decode.role._requests.values())


def until_preempted(cluster, decode):
    """The request that waits for the second time for blocks."""
    cluster.until(lambda: preemptions(decode) > 0)
    waiting = [r for r in decode.role._requests.values() if r.state is RequestState.PREEMPTED]
    assert len(waiting) == 1
    return waiting[0]


@both_lanes
def test_blocks_are_held_as_they_are_needed(cluster, lane):
    _, decode = cluster.pair(lane)
    decode.runner.hold()
    sent = cluster.send(decode, num_tokens=10, max_new_tokens=30)
    cluster.until(lambda: decode.role.status()["running"] == 1)
    assert decode.pools.counts().used == SPEC.num_blocks(10 + SPEC.block_size)
    decode.runner.release()
    cluster.finish(sent)
    sent.check_equal()
    assert sent.finished.num_blocks == SPEC.num_blocks(10 + 30 - 1)  # the last token's KV is not
    cluster.until_idle()


@both_lanes
def test_who_came_last_makes_room_and_loses_nothing(cluster, lane):
    _, decode = tight_pair(cluster, lane)
    sent = [cluster.send(decode, num_tokens=9 + i, max_new_tokens=30) for i in range(6)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    assert preemptions(decode) > 0
    cluster.until_idle()


def pair_of(cluster, lane, specs, bound=17):
    engine = {"specs": specs, "capacity": 128}
    ours = {"engine": {**engine, "bound": bound}, "max_model_len": 52}
    return cluster.pair(lane, prefill={"engine": engine}, decode=ours)


@pytest.mark.parametrize("specs", [[SPEC, SLIDING], [LATENT], [LATENT, SLIDING, SPEC]])
def test_groups_that_grow_differently(cluster, specs):
    _, decode = pair_of(cluster, "pull", specs, bound=21)
    sent = [cluster.send(decode, num_tokens=9 + 4 * i, max_new_tokens=25) for i in range(5)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    assert preemptions(decode) > 0
    cluster.until_idle()


def test_two_that_each_want_all_do_not_take_turns_for_ever(cluster):
    """The older one runs through; the other is preempted once, and comes after it."""
    _, decode = tight_pair(cluster)
    first, second = (cluster.send(decode, num_tokens=4, max_new_tokens=60) for _ in range(2))
    cluster.finish(first)
    assert second.finished is None
    cluster.finish(second)
    for one in (first, second):
        one.check_equal()
    assert preemptions(decode) == 1
    cluster.until_idle()


def test_who_is_let_in_leaves_a_block_for_each_that_grows(cluster):
    _, decode = tight_pair(cluster)
    decode.runner.hold()
    running = [cluster.send(decode, num_tokens=12, max_new_tokens=20) for _ in range(2)]
    cluster.until(lambda: num_filled(decode) == 2)
    assert decode.pools.counts().used == 8
    third = cluster.send(decode, num_tokens=23, max_new_tokens=5)  # 7 blocks, and 2 are kept
    cluster.turn_for(0.1)
    assert decode.pools.counts().used == 8
    fourth = cluster.send(decode, num_tokens=4, max_new_tokens=1)
    decode.runner.release()
    cluster.finish(*running, third, fourth)
    for one in (*running, third, fourth):
        one.check_equal()
    cluster.until_idle()


def test_a_cache_that_can_grow_does_so_instead(cluster):
    elastic = {"kv_commit": "elastic", "kv_initial_blocks": 8}
    _, decode = cluster.pair("push", decode={"engine": {"capacity": 96}, **elastic})
    sent = [cluster.send(decode, num_tokens=9, max_new_tokens=40) for _ in range(5)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    assert decode.pools.num_blocks[0] > 40
    assert preemptions(decode) == 0
    cluster.until_idle()


def test_what_has_an_encoder_holds_all_from_the_start(cluster):
    _, decode = pair_of(cluster, "push", [SPEC, CROSS])
    sent = [cluster.send(decode, num_tokens=9, max_new_tokens=30) for _ in range(4)]
    cluster.until(lambda: decode.role.status()["running"] > 0)
    request = next(r for r in decode.role._requests.values() if r.blocks)
    assert [len(ids) for ids in request.blocks] == [8, 3]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    assert preemptions(decode) == 0
    cluster.until_idle()


def test_what_prefill_could_not_take_back_holds_all_from_the_start(cluster):
    _, decode = cluster.pair(
        "push", prefill={"max_model_len": 30}, decode={"engine": {"bound": 17}}
    )
    decode.runner.hold()
    short = cluster.send(decode, num_tokens=9, max_new_tokens=21)
    long = cluster.send(decode, num_tokens=9, max_new_tokens=22)
    cluster.until(lambda: decode.role.status()["running"] + decode.role.status()["waiting"] == 2)
    cluster.until(lambda: all(r.blocks for r in decode.role._requests.values()))
    held = [len(r.blocks[0]) for r in decode.role._requests.values()]
    assert held == [SPEC.num_blocks(9 + 4), SPEC.num_blocks(9 + 22)]
    decode.runner.release()
    cluster.finish(short, long)
    for one in (short, long):
        one.check_equal()
    cluster.until_idle()


def test_digests_are_of_the_prompt_as_it_arrived_first(cluster):
    _, decode = tight_pair(cluster, kv_digest="always")
    sent = [cluster.send(decode, num_tokens=11, max_new_tokens=30) for _ in range(4)]
    cluster.finish(*sent)
    for one in sent:
        assert len(one.finished.kv_digests) == SPEC.num_blocks(11)
        one.check_equal()
    assert preemptions(decode) > 0
    cluster.until_idle()


@pytest.mark.parametrize("how", ["cancel", "router"])
def test_one_that_was_preempted_may_end_at_once(cluster, how):
    _, decode = tight_pair(cluster)
    first, second = (cluster.send(decode, num_tokens=4, max_new_tokens=60) for _ in range(2))
    until_preempted(cluster, decode)
    if how == "router":
        cluster.router.close()
        cluster.router = None
        cluster.until_idle()
        return
    cluster.router.cancel(second.completion)
    cluster.finish(second)
    assert second.finished.reason == "cancelled"
    assert first.finished is None
    cluster.finish(first)
    first.check_equal()
    cluster.until_idle()


def test_who_is_preempted_has_time_while_others_run_and_no_longer(cluster):
    """Its prefill worker is gone: what it said stands, and it ends in an error, not as if whole."""
    prefill, decode = tight_pair(cluster, request_timeout_s=0.4)
    first, second = (cluster.send(decode, num_tokens=4, max_new_tokens=60) for _ in range(2))
    request = until_preempted(cluster, decode)
    decode.runner.hold()
    cluster.remove(prefill)
    decode.peers.lose(next(p.key for p in decode.peers.ready() if p.facts), "it is gone")
    cluster.turn_for(0.8)
    assert request.state is RequestState.PREEMPTED
    assert first.finished is None
    decode.runner.release()
    cluster.finish(first, second)
    first.check_equal()
    assert second.finished.reason == "error"
    assert "deadline passed in state PREEMPTED" in second.finished.error
    told = second.completion.output
    assert 0 < len(told) < 60
    assert told == second.reference.tokens[: len(told)]
    cluster.until_idle()


def test_what_fails_on_the_way_back_is_tried_elsewhere(cluster):
    prefill, decode = tight_pair(cluster)
    other = cluster.add("prefill", lane="push", worker_id="prefill-1")
    decode.peers.dial(other.address)
    cluster.until(lambda: len([p for p in decode.peers.ready() if p.facts]) == 2)
    first, second = (cluster.send(decode, num_tokens=4, max_new_tokens=60) for _ in range(2))
    until_preempted(cluster, decode)
    prefill.runner.fail_next = "out of tune"
    cluster.finish(first, second)
    for one in (first, second):
        one.check_equal()
    cluster.until_idle()


def test_the_prefill_that_a_router_named_is_preferred_and_not_waited_for():
    here = [SimpleNamespace(key=f"key-{i}", name=f"prefill-{i}", takes_new=True) for i in range(3)]
    generate = Generate("r", [1], 4, Sampling(), [], "prefill-1", False)
    request = DecodeRequest(generate, "router", 0.0, output=[5])
    again = request.preempted(0.0)
    load = {"key-1": [1, 2, 3], "key-2": [1]}
    others = [here[0], here[2]]
    for one in (request, again):
        assert choose_prefill(one, here, load) is here[1]
        assert choose_prefill(one, others, load) is here[0]


# --- a prefill worker that the test plays ---------------------------------------------------------


def serve(cluster, wire, asked, token):
    """Hand over what was asked for, whatever is in it."""
    wire.send(
        Done(
            asked.request_id,
            asked.grant.grant_id,
            len(asked.tokens),
            asked.grant.num_cached_tokens,
            SPEC.num_layers,
            1,
            token,
            TransferStats(),
            None,
        )
    )


def two_and_a_preemption(cluster):
    """Two requests, of which the second was preempted and asked for again: its PrefillRequest."""
    wire, decode = meet(cluster, "push", **SMALL)
    decode.runner.hold()
    sent = [cluster.send(decode, num_tokens=4, max_new_tokens=60) for _ in range(2)]
    cluster.until(lambda: len(wire.of(PrefillRequest)) == 2)
    for asked in wire.of(PrefillRequest):
        serve(cluster, wire, asked, 7)
    cluster.until(lambda: num_filled(decode) == 2)
    decode.runner.release()
    cluster.finish(sent[0])
    cluster.until(lambda: len(wire.of(PrefillRequest)) == 3)
    return wire, sent[1], wire.of(PrefillRequest)[2]


def test_it_is_asked_for_with_all_that_was_told_and_goes_on_behind_it(cluster):
    wire, second, asked = two_and_a_preemption(cluster)
    told = list(second.completion.output)
    assert asked.tokens == [*second.completion.tokens, *told]
    assert asked.grant.blocks is not None, "it is not queued behind others a second time"
    assert 0 < asked.grant.timeout_s <= 60.0
    wire.send(FirstToken(asked.request_id, asked.grant.grant_id, 50))
    cluster.until(lambda: len(second.completion.output) > len(told))
    assert second.completion.output == [*told, 50]
    serve(cluster, wire, asked, 50)
    cluster.finish(second)
    assert (second.finished.reason, second.finished.num_tokens) == ("length", 60)
    assert second.completion.output[: len(told) + 1] == [*told, 50]
    settle_all(cluster, wire)


def test_a_busy_prefill_is_asked_again_and_not_said_to_have_done_nothing(cluster):
    wire, second, asked = two_and_a_preemption(cluster)
    for count in (4, 5):
        wire.send(Busy(asked.request_id, asked.grant.grant_id, float("nan")))
        cluster.until(lambda: len(wire.of(PrefillRequest)) == count)  # noqa: B023
        again = wire.of(PrefillRequest)[-1]
        assert (again.tokens, again.request_id) == (asked.tokens, asked.request_id)
        assert again.grant.grant_id != asked.grant.grant_id
        asked = again
    assert second.finished is None
    serve(cluster, wire, asked, 50)
    cluster.finish(second)
    assert second.finished.reason == "length"
    settle_all(cluster, wire)


def test_where_nobody_takes_it_back_the_reason_is_told(cluster):
    wire, second, asked = two_and_a_preemption(cluster)
    wire.send(Failed(asked.request_id, asked.grant.grant_id, "out of luck"))
    cluster.finish(second)
    assert second.finished.reason == "error"
    assert "out of luck" in second.finished.error
    assert second.finished.num_tokens == len(second.completion.output) < 60
    settle_all(cluster, wire)


def test_another_next_token_than_was_told_ends_it(cluster):
    wire, second, asked = two_and_a_preemption(cluster)
    told = len(second.completion.output)
    wire.send(FirstToken(asked.request_id, asked.grant.grant_id, 50))
    cluster.until(lambda: len(second.completion.output) > told)
    serve(cluster, wire, asked, 51)
    cluster.finish(second)
    assert second.finished.reason == "error"
    assert len(second.completion.output) == told + 1
    settle_all(cluster, wire)


def test_word_of_the_first_grant_says_nothing_of_the_second(cluster):
    wire, second, _ = two_and_a_preemption(cluster)
    told, first = list(second.completion.output), wire.of(PrefillRequest)[1]
    serve(cluster, wire, first, 7)
    wire.send(FirstToken(first.request_id, first.grant.grant_id, 7))
    wire.send(Failed(first.request_id, first.grant.grant_id, "late"))
    cluster.turn_for(0.05)
    assert second.completion.output == told
    assert second.finished is None
    cluster.router.cancel(second.completion)
    cluster.until(lambda: bool(wire.of(Abort)))
    settle_all(cluster, wire)


@pytest.mark.parametrize("ends", [True, False])
def test_one_that_runs_alone_waits_for_blocks_that_others_hold(cluster, ends):
    """They are being given back, or nobody knows when they are: then it has a deadline, too."""
    wire, decode = meet(cluster, "push", **SMALL, request_timeout_s=0.6)
    first, second = (cluster.send(decode, n, max_new_tokens=20) for n in (24, 24))
    cluster.until(lambda: len(wire.of(PrefillRequest)) == 2)
    serve(cluster, wire, wire.of(PrefillRequest)[0], 7)
    cluster.until(lambda: any(r.is_short for r in decode.role._requests.values()))
    assert decode.pools.counts().used == 9 + 7
    cluster.until(lambda: len(first.completion.output) == 13)  # 24 + 12 of KV: 9 blocks
    cluster.finish(second)
    assert "deadline passed in state GRANTED" in second.finished.error
    if ends:
        settle_all(cluster, wire)
        cluster.finish(first)
        assert first.finished.reason == "length"
    else:
        cluster.finish(first)
        assert first.finished.reason == "error"
        assert "deadline passed in state RUNNING" in first.finished.error
    settle_all(cluster, wire)


# --- together -------------------------------------------------------------------------------------


def test_who_shares_the_batch_may_leave_it_at_once(cluster):
    """One joins while another runs, without waiting for its end; and one that is cancelled while
    it waits for room in the batch gives its blocks back before the step is over."""
    _, decode = cluster.pair("push", decode={"max_num_seqs": 2})
    long = [cluster.send(decode, num_tokens=5, max_new_tokens=100)]
    cluster.until(lambda: len(long[0].completion.output) > 3)
    short = cluster.send(decode, num_tokens=5, max_new_tokens=4)
    cluster.finish(short)
    short.check_equal()
    assert long[0].finished is None
    long += [cluster.send(decode, num_tokens=5, max_new_tokens=100) for _ in range(2)]
    cluster.until(lambda: decode.role.status()["running"] == 2 and num_filled(decode) == 3)
    cluster.until(lambda: len(decode.role._decoding._batch.members) == 3)
    decode.runner.hold()
    cluster.router.cancel(long[2].completion)
    cluster.finish(long[2])
    assert long[2].finished.reason == "cancelled"
    assert len(long[2].completion.output) == 1
    decode.runner.release()
    for one in long[:2]:
        cluster.router.cancel(one.completion)
    cluster.finish(*long)
    cluster.until_idle()


def test_a_cache_that_goes_to_sleep_lets_those_end_who_run(cluster):
    """What shall go is not granted to others, but to them it is."""
    _, decode = tight_pair(cluster)
    sent = cluster.send(decode, num_tokens=5, max_new_tokens=50)
    cluster.until(lambda: len(sent.completion.output) > 3)
    answers = []
    decode.parts.residency.sleep(10.0, answers.append)
    cluster.until(lambda: bool(answers))
    assert answers[0].problem == ""
    cluster.finish(sent)
    sent.check_equal()
    decode.parts.residency.wake_up(answers.append)
    cluster.until(lambda: len(answers) == 2)
    cluster.until_idle()


LANES = ["push", pytest.param("pull", marks=pytest.mark.slow)]
ARRIVALS = st.lists(
    st.tuples(
        st.integers(1, 30),
        st.integers(1, 34),
        st.sampled_from([0, 0, 0, 5, 20]),
        st.sampled_from([None, None, None, None, 0, 15]),
    ),
    min_size=3,
    max_size=10,
)
"""(tokens of the prompt, new ones, turns until the next comes, turns until it is cancelled)"""


@pytest.fixture(scope="module", params=LANES)
def tight(request):
    """Used again and again: nothing of one example may be left for the next."""
    found = Cluster()
    _, decode = tight_pair(found, request.param, max_num_seqs=4)
    yield found, decode
    found.close()


def check_arrivals(cluster, decode, arrivals):
    sent, cancels = [], []
    for num_tokens, max_new_tokens, pause, cancelled_after in arrivals:
        sent.append(cluster.send(decode, num_tokens=num_tokens, max_new_tokens=max_new_tokens))
        if cancelled_after is not None:
            cancels.append((cancelled_after, sent[-1]))
        for _ in range(pause):
            cluster.turn()
    for after, one in sorted(cancels, key=lambda pair: pair[0]):
        for _ in range(after):
            cluster.turn()
        cluster.router.cancel(one.completion)
    cluster.finish(*sent)
    for one in sent:
        if one.finished.reason == "cancelled":
            output = one.completion.output
            assert output == one.reference.tokens[: len(output)]
        else:
            one.check_equal()
    cluster.until_idle()


def checked(max_examples):
    slow_is_fine = settings(
        max_examples=max_examples, deadline=None, suppress_health_check=list(HealthCheck)
    )

    def wrap(test):
        return slow_is_fine(given(arrivals=ARRIVALS)(test))

    return wrap


@checked(6)
def test_whatever_comes_is_answered_in_full_and_rightly(tight, arrivals):
    check_arrivals(*tight, arrivals)


@pytest.mark.slow
@checked(150)
def test_much_of_it_too(tight, arrivals):
    check_arrivals(*tight, arrivals)
