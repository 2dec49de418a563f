"""A prefill and a decode worker, and what reaches a router, in both directions."""

import dataclasses
import itertools

import pytest
from support.workers import SPEC

LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
LANES = ["push", "pull"]
both_lanes = pytest.mark.parametrize("lane", LANES)
PAIRS = [
    *itertools.islice(zip(LAYOUTS, LAYOUTS[3:] + LAYOUTS[:3], itertools.cycle(LANES)), 6),
    ("LBHNC", "LBHNC", "pull"),
    ("LHBNC", "LHBNC", "push"),
]


@pytest.mark.parametrize("prefill, decode, lane", PAIRS)
def test_kv_arrives_bit_identical_whatever_the_layouts(cluster, prefill, decode, lane):
    _, receiver = cluster.pair(
        lane, prefill={"engine": {"layout": prefill}}, decode={"engine": {"layout": decode}}
    )
    sent = [cluster.send(receiver, num_tokens=n) for n in (1, 4, 19)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    cluster.until_idle()


@both_lanes
def test_more_requests_than_blocks_queue_and_all_finish(cluster, lane):
    """Each needs 5 of the 7 blocks of either side, so they go one by one."""
    _, decode = cluster.pair(lane, engine={"bound": 8})
    sent = [cluster.send(decode, num_tokens=14 + i % 3, max_new_tokens=3) for i in range(9)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    cluster.until_idle()


@both_lanes
def test_many_run_in_one_batch(cluster, lane):
    _, decode = cluster.pair(lane, max_num_seqs=4)
    decode.runner.hold()
    sent = [cluster.send(decode, num_tokens=5, max_new_tokens=9) for _ in range(7)]
    cluster.turn_for(0.1)
    decode.runner.release()
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    assert max(decode.runner.batch_sizes) == 4
    cluster.until_idle()


@both_lanes
@pytest.mark.parametrize("grower", ["prefill", "decode"])
def test_growth_on_demand_in_the_middle_of_a_transfer(cluster, lane, grower):
    """The first request's bytes wait while the second makes a cache grow; both arrive whole."""
    elastic = {"kv_commit": "elastic", "kv_initial_blocks": 8, "engine": {"capacity": 256}}
    prefill, decode = cluster.pair(lane, **{grower: elastic})
    worker = prefill if grower == "prefill" else decode
    mover = prefill if lane == "push" else decode
    first = cluster.send(decode, num_tokens=12, max_new_tokens=2)
    mover.connector.moving.clear()
    cluster.until(lambda: mover.connector.num_submitted > 0)
    before, base = worker.pools.num_blocks[0], worker.cache.buffer.base_address
    second = cluster.send(decode, num_tokens=60, max_new_tokens=30)
    cluster.until(lambda: worker.pools.num_blocks[0] > before)
    assert len(first.completion.output) <= 1, "what prefill chose, and nothing that decode did"
    assert first.finished is None
    assert worker.parts.growth.regions.generation == 2
    mover.connector.moving.set()
    cluster.finish(first, second)
    first.check_equal()
    second.check_equal()
    assert worker.cache.buffer.base_address == base
    cluster.until_idle()


def test_both_caches_grow_many_times_under_load(cluster):
    elastic = {"kv_commit": "elastic", "kv_initial_blocks": 2, "engine": {"capacity": 200}}
    prefill, decode = cluster.pair("pull", prefill=elastic, decode=elastic, max_num_seqs=3)
    sent = [cluster.send(decode, 5 + 9 * i, max_new_tokens=6) for i in range(10)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    assert prefill.parts.growth.regions.generation > 2
    assert decode.parts.growth.regions.generation > 2
    cluster.until_idle()


def test_two_prefill_workers_share_the_load(cluster):
    first, decode = cluster.pair("push", prefill={"worker_id": "prefill-0"})
    second = cluster.add("prefill", lane="push", worker_id="prefill-1")
    decode.peers.dial(second.address)
    cluster.until(lambda: len(decode.peers.ready()) == 2)
    for worker in (first, second):
        worker.runner.hold()
    sent = [cluster.send(decode, num_tokens=6) for _ in range(6)]
    cluster.until(lambda: first.role.status()["jobs"] == second.role.status()["jobs"] == 3)
    for worker in (first, second):
        worker.runner.release()
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    cluster.until_idle()


def test_a_decode_worker_that_starts_first_serves_when_prefill_comes(cluster):
    decode = cluster.add("decode")
    reserved = cluster.add("prefill")
    address = reserved.address
    cluster.remove(reserved)
    decode.peers.dial(address)
    sent = cluster.send(decode)
    cluster.turn_for(0.2)
    assert sent.finished is None
    cluster.add("prefill", listen=address)
    cluster.finish(sent)
    sent.check_equal()
    cluster.until_idle()


def test_stop_tokens_end_a_request(cluster):
    _, decode = cluster.pair("pull")
    plain = cluster.send(decode, tokens=[5, 6, 7], max_new_tokens=6)
    cluster.finish(plain)
    stop = plain.completion.output[2]
    at = plain.completion.output.index(stop)
    sent = cluster.send(decode, tokens=[5, 6, 7], max_new_tokens=6, stop_token_ids=[stop])
    first = cluster.send(
        decode, tokens=[5, 6, 7], max_new_tokens=6, stop_token_ids=[plain.completion.output[0]]
    )
    cluster.finish(sent, first)
    assert sent.finished.reason == first.finished.reason == "stop"
    assert sent.completion.output == plain.completion.output[: at + 1]
    assert len(first.completion.output) == 1
    cluster.until_idle()


def test_one_new_token_needs_no_decode_step(cluster):
    _, decode = cluster.pair("push")
    sent = cluster.send(decode, max_new_tokens=1)
    cluster.finish(sent)
    sent.check_equal()
    assert decode.runner.batch_sizes == []
    cluster.until_idle()


@both_lanes
def test_the_hand_over_is_accounted(cluster, lane):
    _, decode = cluster.pair(lane)
    sent = cluster.send(decode, num_tokens=19)
    cluster.finish(sent)
    stats = sent.completion.transfer
    spec = decode.cache.geometry.groups[0].spec
    assert stats.num_bytes == 19 * spec.block_bytes // spec.block_size
    assert stats.num_tickets == 3  # chunks of 8 tokens
    assert stats.num_runs >= stats.num_tickets
    assert stats.busy_ns > 0
    assert stats.start_ns < stats.end_ns
    assert sent.finished.num_blocks == spec.num_blocks(19 + 4)


SIZES = [(4, 8), (8, 4), (4, 16), (16, 4), (2, 4)]


@both_lanes
@pytest.mark.parametrize("sizes", SIZES)
def test_block_sizes_may_differ_where_one_divides_the_other(cluster, lane, sizes):
    specs = [[dataclasses.replace(SPEC, block_size=size)] for size in sizes]
    engines = [{"engine": {"specs": one}, "max_num_batched_tokens": 16} for one in specs]
    _, decode = cluster.pair(lane, prefill=engines[0], decode=engines[1], kv_digest="always")
    sent = [cluster.send(decode, num_tokens=n) for n in (1, 7, 19, 40)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    cluster.until_idle()


STREAMING = {"kv_stream_bytes": 1, "max_num_batched_tokens": 8}


@both_lanes
def test_layers_travel_while_later_ones_are_computed(cluster, lane):
    prefill, decode = cluster.pair(lane, prefill=STREAMING)
    prefill.runner.hold_layers()
    sent = cluster.send(decode, num_tokens=8)
    mover = prefill if lane == "push" else decode
    cluster.until(lambda: mover.connector.num_submitted == 1)
    prefill.runner.release()
    cluster.finish(sent)
    sent.check_equal()
    assert mover.connector.num_submitted == 2
    cluster.until_idle()


@both_lanes
@pytest.mark.parametrize("layouts", [("LBHNC", "BLNHC"), ("BHLNC", "LHBNC")])
def test_layer_by_layer_all_arrives(cluster, lane, layouts):
    engines = [{"engine": {"layout": layout}} for layout in layouts]
    prefill, decode = cluster.pair(lane, prefill=engines[0] | STREAMING, decode=engines[1])
    sent = [cluster.send(decode, num_tokens=n) for n in (1, 8, 19)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    assert prefill.pools.counts().used == 0
    cluster.until_idle()


@both_lanes
def test_a_decode_lost_between_two_layers_leaves_nothing_behind(cluster, lane):
    prefill, decode = cluster.pair(lane, prefill=STREAMING)
    prefill.runner.hold_layers()
    cluster.send(decode, num_tokens=8)
    mover = prefill if lane == "push" else decode
    cluster.until(lambda: mover.connector.num_submitted == 1)
    prefill.peers.lose(prefill.peers.ready()[0].key, "the test says so")
    prefill.runner.release()
    cluster.until(lambda: prefill.pools.counts().used == 0)
