"""Caches of several groups between a prefill and a decode worker: each with a spec and a layout of
its own, in both directions, against a process in which every token has a place of its own."""

import random

import pytest
from support.workers import SPEC

from kvxfer.cache.footprint import prompt_entries
from kvxfer.cache.spec import GroupKind, KVCacheSpec

FULL = SPEC
SLIDING = KVCacheSpec(3, 1, 8, 24, "float32", 4, GroupKind.SLIDING, 10)
NARROW = KVCacheSpec(1, 2, 16, 16, "bfloat16", 4, GroupKind.SLIDING, 1)
LATENT = KVCacheSpec(2, 1, 24, 8, "float32", 4, GroupKind.MLA)
CROSS = KVCacheSpec(2, 2, 16, 16, "float32", 4, GroupKind.CROSS)
KINDS = {
    "full and sliding": ([FULL, SLIDING], "LBNHC,BLHNC", "BHLNC,LHBNC"),
    "sliding only": ([SLIDING], "LBHNC", "BLNHC"),
    "a window of one token": ([SLIDING, NARROW], "LBNHC,LBNHC", "LBHNC,BLHNC"),
    "latent": ([LATENT], "LBNHC", "LBHNC"),
    "encoder-decoder": ([FULL, CROSS], "LBHNC,BLHNC", "LHBNC,LBNHC"),
    "three": ([LATENT, SLIDING, FULL], "LBNHC,BLNHC,LBHNC", "LBNHC,LBNHC,BLHNC"),
}
both_lanes = pytest.mark.parametrize("lane", ["push", "pull"])
all_kinds = pytest.mark.parametrize("kind", KINDS)


def pair(cluster, kind, lane, **more):
    specs, theirs, ours = KINDS[kind]
    engine = {"specs": specs, "capacity": 128}
    return cluster.pair(
        lane,
        prefill={"engine": {**engine, "layout": theirs}},
        decode={"engine": {**engine, "layout": ours}},
        **more,
    )


@all_kinds
@both_lanes
def test_kv_and_tokens_are_those_of_a_single_process(cluster, kind, lane):
    _, decode = pair(cluster, kind, lane)
    sent = [cluster.send(decode, num_tokens=n, max_new_tokens=17) for n in (1, 8, 10, 31, 60)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    cluster.until_idle()


@both_lanes
def test_of_a_window_only_its_blocks_travel_and_are_held(cluster, lane):
    _, decode = pair(cluster, "full and sliding", lane)
    decode.runner.hold()
    sent = cluster.send(decode, num_tokens=60, max_new_tokens=20)
    cluster.until(lambda: decode.role._requests and _is_filled(decode))
    (request,) = decode.role._requests.values()
    entries = prompt_entries([FULL, SLIDING], 60)
    assert [len(kept) for kept in entries] == [15, 3]
    assert [len(ids) for ids in request.blocks] == [16, 4], "of the others as they are needed"
    pages = [SLIDING.page_bytes * SLIDING.num_layers * 3, FULL.block_bytes * 15]
    assert request.stats.num_bytes == sum(pages), "whole blocks: 60 tokens end with one"
    decode.runner.release()
    cluster.finish(sent)
    sent.check_equal()
    assert sent.finished.num_blocks == 20 + 4
    cluster.until_idle()


def _is_filled(worker):
    return all(r.state.name in ("FILLED", "RUNNING") for r in worker.role._requests.values())


@all_kinds
def test_elastic_groups_grow_each_as_it_runs_low(cluster, kind):
    elastic = {"kv_commit": "elastic", "kv_initial_blocks": 3}
    prefill, decode = pair(cluster, kind, "push", **elastic)
    start = decode.pools.num_blocks
    sent = [cluster.send(decode, num_tokens=5 + 9 * i, max_new_tokens=8) for i in range(7)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    cluster.until_idle()
    assert decode.pools.num_blocks > start
    assert prefill.parts.growth.regions.generation > 1


def test_one_group_cannot_take_the_floor_of_another(cluster):
    """Sequences of any length go on being served, one by one if need be."""
    specs = [FULL, SLIDING]
    engine = {"specs": specs, "capacity": 128, "bound": 16}
    elastic = {"kv_commit": "elastic", "kv_initial_blocks": 2}
    _, decode = cluster.pair("push", engine=engine, **elastic)
    longest = decode.engine.max_model_len
    lengths = [longest - 4, 3, 3, 3, 3, 3, 3, longest - 4, 12, 12, longest - 4]
    sent = [cluster.send(decode, num_tokens=n, max_new_tokens=4) for n in lengths]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    held = decode.engine.cache.geometry.bytes_of(decode.pools.num_blocks)
    assert held <= decode.engine.budget.kv_bytes
    cluster.until_idle()


@both_lanes
def test_groups_shrink_sleep_and_wake_between_requests(cluster, lane):
    elastic = {"kv_commit": "elastic", "kv_initial_blocks": 8}
    prefill, decode = pair(cluster, "three", lane, **elastic)
    chance = random.Random(lane)
    for _ in range(12):
        worker = chance.choice([prefill, decode])
        name = chance.choice(["shrink", "sleep", "defragment"])
        sent = cluster.send(decode, num_tokens=chance.randint(5, 60))
        cluster.finish(sent)
        sent.check_equal()
        arguments = ([chance.randint(2, 20) for _ in range(3)], 5.0) if name == "shrink" else (5.0,)
        answers = []
        getattr(worker.parts.residency, name)(*arguments, answers.append)
        cluster.until(lambda found=answers: bool(found))
        assert answers[0].problem == ""
        if name == "sleep":
            worker.parts.residency.wake_up(answers.append)
            cluster.until(lambda found=answers: len(found) == 2)
            assert answers[1].problem == ""
        cluster.until_idle()


def test_a_peer_with_other_groups_is_refused(cluster):
    from kvxfer.errors import HandshakeRejected

    prefill = cluster.add("prefill", engine={"specs": [FULL, SLIDING]})
    decode = cluster.add("decode", engine={"specs": [FULL]})
    decode.peers.dial(prefill.address)
    with pytest.raises(HandshakeRejected, match="groups"):
        cluster.until(lambda: bool(decode.peers.ready()))
