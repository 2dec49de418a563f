"""A decode worker that has had a prompt's beginning before: what travels, what is kept, and that
nobody writes to what others read."""

import dataclasses
import logging
import random

import pytest
from support.decode_wire import TOKENS
from support.null_runner import VOCAB_SIZE, Reference
from support.prefill_wire import FIRST, confirmed, done, first_token, meet, ready, settle_all
from support.workers import SPEC

from kvxfer.cache.spec import GroupKind
from kvxfer.control.messages import Failed, PrefillRequest, Taken
from kvxfer.errors import CacheError

both_lanes = pytest.mark.parametrize("lane", ["push", "pull"])
TOKEN_BYTES = SPEC.block_bytes // SPEC.block_size
N = SPEC.block_size


def serve(cluster, decode, tokens, max_new_tokens=3):
    """Tokens, and digests of all of the prompt's KV, are the reference's; the bytes that came."""
    sent = cluster.send(decode, tokens=tokens, max_new_tokens=max_new_tokens)
    cluster.finish(sent)
    sent.check_equal()
    return sent.finished.transfer.num_bytes


def hits(decode):
    status = decode.role.status()
    return status["prefix_cache_hit_tokens"], status["prefix_cache_query_tokens"]


def make_tokens(seed, num_tokens):
    return [(seed * i + 1) % VOCAB_SIZE for i in range(num_tokens)]


# --- what travels ---------------------------------------------------------------------------------


@both_lanes
@pytest.mark.parametrize(
    "num_tokens, is_cached_at_prefill", [(1, True), (4, True), (5, True), (9, False), (19, True)]
)
def test_of_a_prompt_that_came_before_only_the_end_travels(
    cluster, lane, num_tokens, is_cached_at_prefill
):
    prefill = {"enable_prefix_caching": is_cached_at_prefill}
    _, decode = cluster.pair(lane, prefill=prefill, kv_digest="always")
    tokens = make_tokens(3, num_tokens)
    assert serve(cluster, decode, tokens) == num_tokens * TOKEN_BYTES
    cluster.until_idle()
    cached = (num_tokens - 1) // N * N
    assert serve(cluster, decode, tokens) == (num_tokens - cached) * TOKEN_BYTES
    cluster.until_idle()
    assert hits(decode) == (cached, 2 * num_tokens)
    status = decode.role.status()
    assert status["prefix_cache_blocks"] == (num_tokens + 2) // N, "of 3 new tokens 2 have KV"


@both_lanes
@pytest.mark.parametrize("num_shared", [3, 4, 17])
def test_two_prompts_share_whole_blocks_and_no_more(cluster, lane, num_shared):
    _, decode = cluster.pair(lane)
    one = make_tokens(5, 22)
    other = one[:num_shared] + [(token + 1) % VOCAB_SIZE for token in one[num_shared:]]
    serve(cluster, decode, one)
    assert serve(cluster, decode, other) == (22 - num_shared // N * N) * TOKEN_BYTES
    cluster.until_idle()
    assert hits(decode) == (num_shared // N * N, 44)


@both_lanes
@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (4, 16), (16, 4)])
def test_what_travels_may_begin_inside_a_block_of_prefills(cluster, lane, sizes):
    specs = [[dataclasses.replace(SPEC, block_size=size)] for size in sizes]
    options = [{"engine": {"specs": one}, "max_num_batched_tokens": 16} for one in specs]
    _, decode = cluster.pair(lane, prefill=options[0], decode=options[1], kv_digest="always")
    tokens, size, total = make_tokens(7, 45), sizes[1], 0
    for end in (21, 21, 45, 30):
        known = {21: 20, 45: 21, 30: 29}[end] // size * size if total else 0
        total += end
        assert serve(cluster, decode, tokens[:end], 1) == (end - known) * TOKEN_BYTES
    cluster.until_idle()


@both_lanes
@pytest.mark.parametrize("is_cached_at_prefill", [True, False])
def test_layer_by_layer_only_what_is_missing_travels(cluster, lane, is_cached_at_prefill):
    """Chunks of 8 tokens: the beginning that is cached ends in the middle of one."""
    prefill = {"kv_stream_bytes": 1, "enable_prefix_caching": is_cached_at_prefill}
    _, decode = cluster.pair(lane, prefill=prefill, kv_digest="always")
    serve(cluster, decode, make_tokens(3, 12))
    assert serve(cluster, decode, make_tokens(3, 30)) == 18 * TOKEN_BYTES
    cluster.until_idle()


@both_lanes
def test_an_answer_is_the_beginning_of_the_next_prompt(cluster, lane):
    _, decode = cluster.pair(lane, kv_digest="always")
    tokens = make_tokens(3, 10)
    for _ in range(3):
        answer = Reference([SPEC], tokens, 7).tokens
        serve(cluster, decode, tokens, 7)
        known = (len(tokens) + 6) // N * N  # of the last token there is no KV
        tokens = [*tokens, *answer, 5, 6]
        assert serve(cluster, decode, tokens, 1) == (len(tokens) - known) * TOKEN_BYTES
    cluster.until_idle()


@both_lanes
def test_many_at_once_share_what_is_there(cluster, lane):
    """The first few get their blocks at once, the others when prefill calls."""
    _, decode = cluster.pair(lane, kv_digest="always")
    tokens = make_tokens(3, 17)
    serve(cluster, decode, tokens)
    sent = [cluster.send(decode, tokens=[*tokens, i], max_new_tokens=6) for i in range(9)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
        assert one.finished.transfer.num_bytes == 2 * TOKEN_BYTES
    cluster.until_idle()
    assert decode.role.status()["prefix_cache_blocks"] >= 4


def test_two_groups_share_a_prefix_together(cluster):
    latent = dataclasses.replace(
        SPEC, num_kv_heads=1, head_dim_k=8, head_dim_v=0, kind=GroupKind.MLA
    )
    _, decode = cluster.pair("pull", engine={"specs": (SPEC, latent)})
    whole = serve(cluster, decode, list(range(18)))
    assert serve(cluster, decode, list(range(18))) * 18 == whole * 2
    cluster.until_idle()
    assert hits(decode) == (16, 36)


@pytest.mark.parametrize("how", ["model", "option"])
def test_where_it_is_off_all_travels(cluster, how, caplog):
    window = dataclasses.replace(SPEC, kind=GroupKind.SLIDING, window=6)
    changes = {"engine": {"specs": (SPEC, window)}} if how == "model" else {}
    with caplog.at_level(logging.INFO):
        _, decode = cluster.pair(
            "pull", decode={"enable_prefix_caching": how == "model"}, **changes
        )
    told = [one.message for one in caplog.records if "prefix cache: off" in one.message]
    assert len(told) == (2 if how == "model" else 0)
    first = serve(cluster, decode, list(range(18)))
    assert serve(cluster, decode, list(range(18))) == first > 0
    cluster.until_idle()
    assert hits(decode) == (0, 0)
    assert decode.role.status()["prefix_cache_blocks"] == 0


# --- what is kept, and when -----------------------------------------------------------------------


def asked_of(cluster, wire, decode, tokens, **more):
    """A request of which the wire, as prefill, holds the grant: (sent, its PrefillRequest)."""
    known = len(wire.of(PrefillRequest))
    sent = cluster.send(decode, tokens=tokens, **more)
    cluster.until(lambda: len(wire.of(PrefillRequest)) > known)
    return sent, wire.of(PrefillRequest)[-1]


def prove(cluster, wire, sent, asked, **changes):
    wire.send(first_token(asked))
    wire.send(done(asked, **{"num_tokens": len(asked.tokens), **changes}))
    cluster.finish(sent)


def filled_once(cluster, lane="push", **options):
    """A decode worker that has TOKENS' first 16 tokens, and the wire that it takes for prefill."""
    wire, decode = meet(cluster, lane, **options)
    sent, asked = asked_of(cluster, wire, decode, TOKENS, max_new_tokens=1)
    assert asked.grant.num_cached_tokens == 0
    if lane == "push":
        prove(cluster, wire, sent, asked)
    else:
        wire.send(ready(asked, 0, 18, blocks=[[1, 2, 3, 4, 5]]))
        cluster.until(lambda: bool(wire.of(Taken)))
        wire.send(confirmed(asked))
        cluster.finish(sent)
    assert sent.finished.reason == "length"
    cluster.until_idle()
    assert decode.pools.counts().cached == 4
    return wire, decode


def test_nothing_is_kept_before_it_is_proved(cluster):
    wire, decode = meet(cluster, "push")
    _, first = asked_of(cluster, wire, decode, TOKENS)
    _, second = asked_of(cluster, wire, decode, TOKENS)
    assert (first.grant.num_cached_tokens, second.grant.num_cached_tokens) == (0, 0)
    assert not {*first.grant.blocks[0]} & {*second.grant.blocks[0]}
    wire.send(first_token(first))
    cluster.turn_for(0.03)
    assert decode.pools.groups[0]._cached.blocks == frozenset()
    wire.send(done(first, num_tokens=18))
    cluster.until(lambda: len(decode.pools.groups[0]._cached.blocks) >= 4)
    wire.send(Failed(second.request_id, second.grant.grant_id, "enough"))
    settle_all(cluster, wire)


@pytest.mark.parametrize("wrong", [{"num_layers": 1}, {"digest": 5}])
def test_what_was_not_proved_is_never_kept(cluster, wrong):
    policy = "always" if "digest" in wrong else "off"
    wire, decode = meet(cluster, "push", kv_digest=policy)
    sent, asked = asked_of(cluster, wire, decode, TOKENS)
    prove(cluster, wire, sent, asked, **wrong)
    assert sent.finished.reason == "error"
    settle_all(cluster, wire)
    assert decode.pools.counts().cached == 0


def test_a_failed_step_keeps_the_prompt_and_nothing_of_the_answer(cluster):
    _, decode = cluster.pair("push")
    sent = cluster.send(decode, tokens=TOKENS, max_new_tokens=60)
    cluster.until(lambda: len(sent.completion.output) >= 4)
    decode.runner.fail_next = "the test says so"
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    cluster.until_idle()
    assert decode.pools.counts().cached == 4


@both_lanes
def test_what_is_given_up_leaves_shared_blocks_as_they_are(cluster, lane):
    """Only the request's own blocks wait in quarantine: others are nobody's to write to."""
    wire, decode = filled_once(cluster, lane)
    sent, asked = asked_of(cluster, wire, decode, TOKENS)
    shared = decode.role._requests[asked.request_id].shared_blocks
    assert len(shared[0]) == 4
    wire.send(first_token(asked))
    cluster.until(lambda: len(sent.completion.output) == 1)
    cluster.router.cancel(sent.completion)
    cluster.finish(sent)
    if lane == "push":
        counts = decode.pools.counts()
        assert (counts.used, counts.quarantined, counts.cached) == (0, 2, 4)
    settle_all(cluster, wire)
    _, again = asked_of(cluster, wire, decode, TOKENS)
    assert again.grant.num_cached_tokens == 16
    assert decode.role._requests[again.request_id].shared_blocks == shared
    wire.send(Failed(again.request_id, again.grant.grant_id, "enough"))
    settle_all(cluster, wire)


# --- what a grant names ---------------------------------------------------------------------------


def test_a_grant_names_what_is_missing_and_nothing_that_is_shared(cluster):
    wire, decode = filled_once(cluster)
    asked = [asked_of(cluster, wire, decode, TOKENS)[1] for _ in range(2)]
    requests = [decode.role._requests[one.request_id] for one in asked]
    (shared,) = requests[0].shared_blocks
    assert requests[1].shared_blocks == [shared]
    named = [one.grant.blocks[0] for one in asked]
    assert [len(ids) for ids in named] == [1, 1], "16 of 18 tokens are there"
    assert len({*shared, *named[0], *named[1]}) == 6
    for one in asked:
        assert one.grant.num_cached_tokens == 16
        wire.send(Failed(one.request_id, one.grant.grant_id, "enough"))
    settle_all(cluster, wire)


@pytest.mark.parametrize("how", ["shared", "cached"])
def test_a_block_that_another_may_read_is_never_granted(cluster, how):
    wire, decode = filled_once(cluster)
    _, asked = asked_of(cluster, wire, decode, TOKENS)
    request = decode.role._requests[asked.request_id]
    (own, *_), sent = request.own_blocks[0], len(wire.received)
    if how == "shared":
        decode.pools.share([[own]])
    else:
        decode.pools.groups[0].cache(own, b"some key")
    for say in (decode.role._receiver.grant, decode.role._receiver.ask_for):
        with pytest.raises(CacheError, match=f"block {own} is no single caller's"):
            say(request)
    cluster.turn_for(0.02)
    assert len(wire.received) == sent
    if how == "shared":
        decode.pools.free([[own]])
    wire.send(Failed(asked.request_id, asked.grant.grant_id, "enough"))
    settle_all(cluster, wire)


@pytest.mark.parametrize("told", [0, 12, 17, 20])
def test_a_done_from_another_token_on_never_makes_kv_count(cluster, told):
    wire, decode = filled_once(cluster)
    sent, asked = asked_of(cluster, wire, decode, TOKENS)
    prove(cluster, wire, sent, asked, num_cached_tokens=told)
    assert sent.finished.reason == "error"
    assert sent.completion.output == [FIRST]
    settle_all(cluster, wire)
    assert decode.pools.counts().cached == 4, "what was proved before stays"


@pytest.mark.parametrize("start", [0, 15])
def test_what_is_there_is_not_written_again(cluster, start):
    wire, decode = filled_once(cluster, "pull")
    sent, asked = asked_of(cluster, wire, decode, TOKENS)
    wire.send(first_token(asked))
    before = decode.connector.num_submitted
    wire.send(ready(asked, start, 18, blocks=[[6]]))
    cluster.finish(sent)
    assert "no part of the prompt" in sent.finished.error
    assert decode.connector.num_submitted == before
    settle_all(cluster, wire)


# --- when memory is wanted ------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["shrink", "sleep", "defragment"])
def test_memory_that_goes_takes_cached_blocks_with_it(cluster, what):
    _, decode = cluster.pair("pull", kv_commit="elastic", kv_initial_blocks=64)
    tokens = list(range(90)) * 2
    serve(cluster, decode, tokens, 1)
    cluster.until_idle()
    assert decode.pools.counts().cached == 45
    answers = []
    arguments = ([9], 5.0) if what == "shrink" else (5.0,)
    getattr(decode.parts.residency, what)(*arguments, answers.append)
    cluster.until(lambda: bool(answers))
    assert answers[0].problem == ""
    left = decode.pools.num_blocks[0] - 1 if what == "shrink" else 0
    assert decode.pools.counts().cached == left < 45
    if what == "sleep":
        decode.parts.residency.wake_up(answers.append)
        cluster.until(lambda: len(answers) == 2)
    cluster.until_idle()
    assert serve(cluster, decode, tokens, 1) == (180 - N * left) * TOKEN_BYTES
    cluster.until_idle()


def test_cached_blocks_make_room_before_the_cache_grows(cluster):
    _, decode = cluster.pair("push", decode={"kv_commit": "elastic", "kv_initial_blocks": 8})
    usable = decode.pools.num_blocks[0]
    for seed in range(2, 8):
        serve(cluster, decode, make_tokens(seed, 18), 2)
    assert decode.pools.num_blocks[0] == usable
    assert decode.pools.counts().cached > 0
    serve(cluster, decode, make_tokens(3, 60), 2)
    assert decode.pools.num_blocks[0] > usable, "but where that is too little, it does"
    cluster.until_idle()


def random_prompts(chance, count):
    """Of few beginnings, so that many are shared, and lengths up to what the cache holds."""
    known = [[chance.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(3)]
    for _ in range(count):
        beginning = chance.choice(known)[: chance.randrange(25)]
        end = [chance.randrange(2) for _ in range(chance.randint(1, 16))]
        yield beginning + end


def run_at_random(cluster, lane, seed, count):
    """Some at once, some given up, in caches that hold a few prompts: every answer, and all KV, is
    the reference's."""
    chance = random.Random(seed)
    caches = [{"engine": {"bound": chance.choice([16, 24, 40])}} for _ in range(2)]
    _, decode = cluster.pair(lane, prefill=caches[0], decode=caches[1], kv_digest="always")
    waiting, num_bytes, num_tokens = [], 0, 0
    for tokens in random_prompts(chance, count):
        new = chance.randint(1, 9)
        waiting.append(cluster.send(decode, tokens=tokens, max_new_tokens=new))
        if chance.random() < 0.15:
            cluster.turn_for(chance.random() * 0.01)
            cluster.router.cancel(waiting[-1].completion)
        if len(waiting) < chance.randint(1, 5):
            continue
        cluster.finish(*waiting)
        for sent in waiting:
            if sent.finished.reason == "cancelled":
                said = sent.completion.output
                assert said == sent.reference.tokens[: len(said)]
                continue
            sent.check_equal()
            num_bytes += sent.finished.transfer.num_bytes
            num_tokens += len(sent.completion.tokens)
        waiting = []
    cluster.finish(*waiting)
    cluster.until_idle()
    assert 0 < num_bytes < num_tokens * TOKEN_BYTES, "some of it was there"
    assert hits(decode)[0] > 0


@both_lanes
def test_prompts_at_random_in_a_small_cache_come_to_the_references_tokens(cluster, lane):
    run_at_random(cluster, lane, seed=f"{lane} 0", count=30)


@pytest.mark.slow
@both_lanes
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_prompts_at_random_come_to_the_references_tokens(cluster, lane, seed):
    run_at_random(cluster, lane, seed=f"{lane} {seed}", count=250)
