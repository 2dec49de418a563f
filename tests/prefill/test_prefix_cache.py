"""A prefill worker that has seen a prompt's beginning before: what it computes, what it hands over,
and what becomes of the blocks."""

import dataclasses
import logging

import pytest
from support.decode_wire import GRANTED, OTHER_TOKENS, TOKENS, ask, greet, meet, settled
from support.null_runner import Reference
from support.workers import SPEC

from kvxfer.cache.prefix_cache import block_hashes
from kvxfer.cache.spec import GroupKind
from kvxfer.control.admission_messages import Granted, Starting
from kvxfer.control.messages import (
    Abort,
    Aborted,
    Confirmed,
    Done,
    Failed,
    FirstToken,
    Ready,
    Taken,
)
from kvxfer.control.resync_messages import GrantQuery

both_lanes = pytest.mark.parametrize("lane", ["push", "pull"])
WHOLE = [(0, SPEC.num_layers)]
ALL_TRAVELS = {"enable_prefix_caching": False}
"""A decode worker that has nothing from before: see tests/decode/test_prefix_cache.py."""


def serve(cluster, decode, tokens, max_new_tokens=3):
    sent = cluster.send(decode, tokens=tokens, max_new_tokens=max_new_tokens)
    cluster.finish(sent)
    sent.check_equal()
    return sent


def hits(prefill):
    status = prefill.role.status()
    return status["prefix_cache_hit_tokens"], status["prefix_cache_query_tokens"]


def offers(wire, name):
    return [one for one in wire.of(Ready) if one.request_id == name]


def offered(cluster, wire, name):
    """All that is offered of a request, as soon as all is."""
    cluster.until(lambda: bool(offers(wire, name)) and offers(wire, name)[-1].final)
    return offers(wire, name)


def take(cluster, wire, *names):
    """Say that all was read, as soon as all was offered; the offers of the last."""
    for name in names:
        found, before = offered(cluster, wire, name), len(wire.of(Confirmed))
        wire.send(Taken(name, f"grant-{name}"))
        cluster.until(lambda n=before: len(wire.of(Confirmed)) > n)
    return found


# --- what is computed -----------------------------------------------------------------------------


@both_lanes
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 8, 9, 16, 19])
def test_a_prompt_seen_before_has_only_its_end_computed(cluster, lane, num_tokens):
    prefill, decode = cluster.pair(
        lane, prefill={"max_num_batched_tokens": 8}, kv_digest="always", decode=ALL_TRAVELS
    )
    tokens = [(3 * i + 1) % 97 for i in range(num_tokens)]
    first = serve(cluster, decode, tokens)
    cluster.until_idle()
    assert (prefill.runner.num_chunks, hits(prefill)) == (-(-num_tokens // 8), (0, num_tokens))
    again = serve(cluster, decode, tokens)
    cluster.until_idle()
    cached = (num_tokens - 1) // 4 * 4
    assert prefill.runner.num_chunks == -(-num_tokens // 8) + 1
    assert hits(prefill) == (cached, 2 * num_tokens)
    assert again.finished.kv_digests == first.finished.kv_digests
    assert again.finished.transfer.num_bytes == first.finished.transfer.num_bytes
    status = prefill.role.status()
    assert status["prefix_cache_blocks"] == num_tokens // 4
    states = ("free", "used", "quarantined")
    held = sum(status[f"blocks_{state}"] for state in states) + status["prefix_cache_blocks"]
    assert held + 1 == status["blocks_total"]


@both_lanes
@pytest.mark.parametrize("num_shared", [0, 3, 4, 11, 16, 17])
def test_two_prompts_share_whole_blocks_and_no_more(cluster, lane, num_shared):
    prefill, decode = cluster.pair(lane)
    one = [(5 * i + 2) % 97 for i in range(22)]
    other = one[:num_shared] + [(token + 1) % 97 for token in one[num_shared:]]
    serve(cluster, decode, one)
    serve(cluster, decode, other)
    cluster.until_idle()
    assert hits(prefill) == (num_shared // 4 * 4, 44)
    assert prefill.role.status()["prefix_cache_blocks"] == 5 + 5 - num_shared // 4


@both_lanes
@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (4, 16), (16, 4)])
def test_decode_may_have_blocks_of_another_size(cluster, lane, sizes):
    specs = [[dataclasses.replace(SPEC, block_size=size)] for size in sizes]
    engines = [{"engine": {"specs": one}, "max_num_batched_tokens": 16} for one in specs]
    prefill, decode = cluster.pair(lane, prefill=engines[0], decode=engines[1], kv_digest="always")
    tokens = list(range(45))
    for end in (45, 45, 30, 21):
        serve(cluster, decode, tokens[:end])
    cluster.until_idle()
    size = sizes[0]
    assert hits(prefill)[0] == sum((end - 1) // size * size for end in (45, 30, 21))


@both_lanes
def test_layers_of_the_end_travel_while_later_ones_are_computed(cluster, lane):
    prefill, decode = cluster.pair(lane, prefill={"kv_stream_bytes": 1}, decode=ALL_TRAVELS)
    tokens = list(range(15))
    serve(cluster, decode, tokens)
    cluster.until_idle()
    mover = prefill if lane == "push" else decode
    before = mover.connector.num_submitted
    prefill.runner.hold_layers()
    sent = cluster.send(decode, tokens=tokens)
    cluster.until(lambda: mover.connector.num_submitted == before + 2)
    cluster.turn_for(0.02)
    assert mover.connector.num_submitted == before + 2, "what was cached, and the first layer"
    prefill.runner.release()
    cluster.finish(sent)
    sent.check_equal()
    cluster.until_idle()


def test_two_groups_share_a_prefix_together(cluster):
    latent = dataclasses.replace(
        SPEC, num_kv_heads=1, head_dim_k=8, head_dim_v=0, kind=GroupKind.MLA
    )
    prefill, decode = cluster.pair("pull", engine={"specs": (SPEC, latent)})
    for _ in range(2):
        serve(cluster, decode, list(range(18)))
    cluster.until_idle()
    assert hits(prefill) == (16, 36)
    assert prefill.role.status()["prefix_cache_blocks"] == 2 * 4


@pytest.mark.parametrize("how", ["model", "option"])
def test_where_it_is_off_every_token_is_computed(cluster, how, caplog):
    window = dataclasses.replace(SPEC, kind=GroupKind.SLIDING, window=6)
    changes = {"engine": {"specs": (SPEC, window)}} if how == "model" else {}
    with caplog.at_level(logging.INFO):
        prefill, decode = cluster.pair("pull", enable_prefix_caching=how == "model", **changes)
    said = [r.message for r in caplog.records if r.message.startswith("prefix cache: off")]
    assert said == ["prefix cache: off, the model has layers of sliding attention"] * (
        2 * (how == "model")
    )
    for _ in range(2):
        serve(cluster, decode, list(range(18)))
    cluster.until_idle()
    assert (hits(prefill), prefill.runner.num_chunks) == ((0, 0), 6)
    assert prefill.role.status()["prefix_cache_blocks"] == 0


# --- what is handed over, and when ----------------------------------------------------------------


def test_what_is_cached_is_offered_while_the_rest_is_not_computed_yet(cluster):
    prefill, wire = meet(cluster, "pull")
    ask(wire, "first")
    (first, *_) = take(cluster, wire, "first")
    prefill.runner.hold()
    ask(wire, "again")
    cluster.until(lambda: len(offers(wire, "again")) == 1)
    (cached,) = offers(wire, "again")
    assert (cached.start, cached.stop, cached.layers, cached.final) == (0, 16, WHOLE, False)
    assert cached.lease.blocks[0][:4] == first.lease.blocks[0][:4], "the very same blocks"
    prefill.runner.release()
    _, rest = take(cluster, wire, "again")
    assert (rest.start, rest.stop, rest.layers, rest.final) == (16, 18, WHOLE, True)
    assert [told.token for told in wire.of(FirstToken)] == Reference([SPEC], TOKENS, 1).tokens * 2
    settled(cluster, prefill)


def test_chunks_end_where_they_would_without_the_cache(cluster):
    prefill, wire = meet(cluster, "pull")
    ask(wire, "short", tokens=TOKENS[:5], blocks=[[9, 3]])
    ask(wire, "long")
    take(cluster, wire, "short", "long")
    stretches = [(one.start, one.stop) for one in offers(wire, "long")]
    assert stretches == [(0, 4), (4, 8), (8, 16), (16, 18)]
    settled(cluster, prefill)


def test_blocks_under_two_leases_stay_until_both_are_over(cluster):
    """The second job has to wait for the first's blocks if it does not share them."""
    prefill, wire = meet(cluster, "pull", engine={"bound": 8})
    ask(wire, "first")
    offered(cluster, wire, "first")
    ask(wire, "second")
    leases = [offered(cluster, wire, name)[0].lease.blocks[0] for name in ("first", "second")]
    assert leases[0][:4] == leases[1][:4]
    assert prefill.pools.counts().used == 6
    take(cluster, wire, "first")
    assert prefill.pools.counts().used == 5, "only the block that was its alone is free"
    ask(wire, "third", tokens=OTHER_TOKENS)
    cluster.turn_for(0.05)
    assert offers(wire, "third") == [], "it waits: nothing that is leased is evicted"
    take(cluster, wire, "second", "third")
    settled(cluster, prefill)


# --- what decode has ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_cached", [4, 8, 16])
def test_what_decode_has_is_not_written(cluster, num_cached):
    """Chunks of 8 tokens, the first of which may have none, or some, that are handed over."""
    prefill, wire = meet(cluster, "push")
    ask(wire, "whole")
    cluster.until(lambda: len(wire.of(Done)) == 1)
    blocks = [8, 2, 6, 4, 10][num_cached // 4 :]
    for view in wire.cache.views[0]:
        view[[8, 2, 6, 4, 10]] = -1.0
    ask(wire, "rest", blocks=[blocks], num_cached=num_cached)
    cluster.until(lambda: len(wire.of(Done)) == 2)
    settled(cluster, prefill)
    whole, rest = wire.of(Done)
    assert (whole.num_cached_tokens, rest.num_cached_tokens) == (0, num_cached)
    assert rest.num_tokens == 18
    assert rest.transfer.num_bytes * 18 == whole.transfer.num_bytes * (18 - num_cached)
    for view in wire.cache.views[0]:
        assert (view[blocks[:-1]] == view[GRANTED[0][num_cached // 4 : 4]]).all()
        assert (view[10][:, :2] == view[GRANTED[0][4]][:, :2]).all()
        assert (view[[8, 2, 6, 4, 10][: num_cached // 4]] == -1.0).all()


def late(cluster, wire, name="r"):
    """Asked for without blocks, and called: its ids."""
    ids = ask(wire, name, blocks=None)
    cluster.until(lambda: any(one.grant_id == ids[1] for one in wire.of(Starting)))
    return ids


def test_what_decode_has_is_not_offered_whoever_asks(cluster):
    """A query from before the blocks were named tells of no token, and may come late."""
    prefill, wire = meet(cluster, "pull")
    ids = late(cluster, wire)
    wire.send(Granted(*ids, [[5, 11]], 12))
    (first, rest) = offered(cluster, wire, "r")
    assert [(one.start, one.stop) for one in (first, rest)] == [(12, 16), (16, 18)]
    assert [len(one.lease.blocks[0]) for one in (first, rest)] == [2, 2]
    wire.send(Granted(*ids, [[5, 11]], 12))
    wire.send(GrantQuery(*ids, 0, [], 0))
    cluster.until(lambda: len(offers(wire, "r")) == 3)
    again = offers(wire, "r")[2]
    assert (again.start, again.stop, again.final, again.lease.blocks) == (
        12,
        18,
        True,
        first.lease.blocks,
    )
    take(cluster, wire, "r")
    assert prefill.peers.ready()
    settled(cluster, prefill)


@pytest.mark.parametrize("read", [(4, [], 0), (8, [1], 16), (0, [1], 8)])
def test_a_query_for_what_decode_has_is_refused(cluster, read):
    prefill, wire = meet(cluster, "pull")
    ids = ask(wire, blocks=[[5, 11]], num_cached=12)
    offered(cluster, wire, "r")
    wire.send(GrantQuery(*ids, *read))
    cluster.until(lambda: not prefill.peers.ready())
    assert len(offers(wire, "r")) == 2
    settled(cluster, prefill)


@pytest.mark.parametrize("granted", [([[5, 11]], 8), ([[5, 11]], 13), ([[]], 18), ([[5]], -1)])
def test_a_late_grant_that_cannot_be_ends_its_request_alone(cluster, granted):
    prefill, wire = meet(cluster, "push")
    ids = late(cluster, wire)
    wire.send(Granted(*ids, *granted))
    cluster.until(lambda: bool(wire.of(Failed)))
    assert "grant: " in wire.of(Failed)[0].reason
    assert prefill.peers.ready()
    settled(cluster, prefill)


@pytest.mark.parametrize("again", [([[5, 11]], 8), ([[5, 11]], 0), ([[11, 5]], 12)])
def test_a_grant_stays_what_it_was(cluster, again):
    prefill, wire = meet(cluster, "push")
    prefill.runner.hold()
    ids = late(cluster, wire)
    wire.send(Granted(*ids, [[5, 11]], 12))
    wire.send(Granted(*ids, *again))
    cluster.until(lambda: not prefill.peers.ready())
    prefill.runner.release()
    cluster.turn_for(0.02)
    assert wire.of(Done) == []
    settled(cluster, prefill)


def test_a_peer_whose_model_has_windows_has_no_beginning(cluster):
    window = dataclasses.replace(SPEC, kind=GroupKind.SLIDING, window=6)
    prefill = cluster.add("prefill", engine={"specs": (SPEC, window)})
    wire = cluster.wire("decode", engine={"specs": (SPEC, window)})
    wire.dial(prefill)
    greet(cluster, wire)
    ask(wire, blocks=[[1], [2, 3]], num_cached=16)
    cluster.until(lambda: bool(wire.of(Failed)))
    assert "layers of sliding attention" in wire.of(Failed)[0].reason
    settled(cluster, prefill)


# --- what is kept ---------------------------------------------------------------------------------


def test_of_a_chunk_that_failed_nothing_is_kept(cluster):
    prefill, wire = meet(cluster, "pull")
    ask(wire, "short", tokens=TOKENS[:8], blocks=[[9, 3]])
    take(cluster, wire, "short")
    settled(cluster, prefill)
    prefill.runner.fail_next = "the test says so"
    ask(wire, "fails")
    cluster.until(lambda: bool(wire.of(Failed)))
    assert [(one.start, one.stop) for one in offers(wire, "fails")] == [(0, 8)]
    settled(cluster, prefill)
    assert prefill.pools.counts().cached == 2
    ask(wire, "again")
    take(cluster, wire, "again")
    assert hits(prefill) == (16, 8 + 18 + 18)
    assert wire.of(FirstToken)[-1].token == Reference([SPEC], TOKENS, 1).tokens[0]
    settled(cluster, prefill)


def test_what_an_aborted_request_had_not_computed_is_not_kept(cluster):
    prefill, wire = meet(cluster, "pull")
    prefill.runner.hold()
    name, grant = ask(wire)
    cluster.until(lambda: prefill.pools.counts().used == 5)
    wire.send(Abort(name, grant, "changed our mind"))
    cluster.turn_for(0.03)
    assert prefill.pools.counts().cached == 0
    prefill.runner.release()
    cluster.until(lambda: bool(wire.of(Aborted)))
    settled(cluster, prefill)
    assert prefill.pools.counts().cached == 2, "the chunk that was under way did end"


def test_cached_blocks_make_room_before_the_cache_grows(cluster):
    prefill, wire = meet(cluster, "pull", kv_commit="elastic", kv_initial_blocks=8)
    usable = prefill.pools.num_blocks[0]
    grown = prefill.parts.growth.regions.generation
    for index in range(6):
        tokens = [(13 * i + index) % 97 for i in range(18)]
        ask(wire, f"r{index}", tokens=tokens)
        take(cluster, wire, f"r{index}")
        prefill.pools.check_conservation()
    assert prefill.pools.num_blocks[0] == usable
    assert prefill.parts.growth.regions.generation == grown
    assert hits(prefill)[0] == 0
    assert prefill.pools.counts().cached > 0
    settled(cluster, prefill)
    ask(wire, "large", tokens=[1] * 48, blocks=[list(range(1, 13))])
    take(cluster, wire, "large")
    assert prefill.pools.num_blocks[0] > usable, "but where that is too little, it does"
    settled(cluster, prefill)


@pytest.mark.parametrize("what", ["shrink", "sleep", "defragment"])
def test_memory_that_goes_takes_cached_blocks_with_it(cluster, what):
    prefill, decode = cluster.pair("pull", kv_commit="elastic", kv_initial_blocks=64)
    tokens = list(range(90)) * 2
    serve(cluster, decode, tokens)
    cluster.until_idle()
    assert prefill.pools.counts().cached == 45
    answers = []
    arguments = ([9], 5.0) if what == "shrink" else (5.0,)
    getattr(prefill.parts.residency, what)(*arguments, answers.append)
    cluster.until(lambda: bool(answers))
    assert answers[0].problem == ""
    left = prefill.pools.num_blocks[0] - 1 if what == "shrink" else 0
    assert prefill.pools.counts().cached == left < 45
    if what == "sleep":
        prefill.parts.residency.wake_up(answers.append)
        cluster.until(lambda: len(answers) == 2)
    cluster.until_idle()
    serve(cluster, decode, tokens)
    cluster.until_idle()
    assert hits(prefill) == (4 * left, 360)


def test_a_shrink_does_not_wait_for_cached_blocks_and_nobody_gets_them_meanwhile(cluster):
    prefill, wire = meet(cluster, "pull", kv_commit="elastic", kv_initial_blocks=64)
    for wanted in (16, 32, 48, 64):  # many chunks, so that it can be shrunk to few blocks
        prefill.parts.growth.request([wanted])
        cluster.until(lambda n=wanted: prefill.pools.num_blocks[0] >= n)
    ask(wire, "low", tokens=TOKENS[:12], blocks=[[20, 21, 22]])
    take(cluster, wire, "low")
    held, answers = [1] * 80, []
    ask(wire, "held", tokens=held, blocks=[list(range(1, 21))])
    offered(cluster, wire, "held")
    prefill.parts.residency.shrink([4], 20.0, answers.append)
    cluster.until(lambda: prefill.pools.groups[0]._limit < 16)
    limit = prefill.pools.groups[0]._limit
    (known,) = prefill.role._prefix_cache.lookup(block_hashes(held, 4), 80)
    assert known == list(range(4, limit)), "what is to go is found no more"
    ask(wire, "again", tokens=TOKENS[:12], blocks=[[20, 21, 22]])
    shared = offered(cluster, wire, "again")[0]
    assert (shared.start, shared.stop) == (0, 8), "below the bound it is still known"
    assert answers == [], "a lease is above the bound"
    take(cluster, wire, "held", "again")
    cluster.until(lambda: bool(answers), timeout_s=5.0)
    assert (answers[0].problem, prefill.pools.num_blocks[0]) == ("", limit)
    settled(cluster, prefill)


def test_cached_tokens_are_sent_to_the_blocks_that_were_granted(cluster):
    """Push: the second time into other blocks than the first."""
    prefill, wire = meet(cluster, "push")
    ask(wire, "first")
    cluster.until(lambda: len(wire.of(Done)) == 1)
    ask(wire, "second", blocks=[[8, 2, 6, 4, 10]])
    cluster.until(lambda: len(wire.of(Done)) == 2)
    settled(cluster, prefill)
    one, other = wire.of(Done)
    assert one.num_tokens == other.num_tokens
    first, second = wire.of(FirstToken)
    assert first.token == second.token
    assert one.transfer.num_bytes == other.transfer.num_bytes
    for view in wire.cache.views[0]:
        assert (view[[8, 2, 6, 4]] == view[GRANTED[0][:4]]).all()
        assert (view[10][:, :2] == view[GRANTED[0][4]][:, :2]).all()
        assert view[8].abs().sum() > 0
    assert prefill.runner.num_chunks == 4
