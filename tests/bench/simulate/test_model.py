"""The model of `kvxfer bench simulate`: what must hold of any cluster, and what theory knows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.bench.serving.prompts import Shape
from kvxfer.bench.simulate.cluster import Cluster
from kvxfer.bench.simulate.costs import Costs
from kvxfer.bench.simulate.report import outcome
from kvxfer.bench.simulate.request import Request, State
from kvxfer.bench.simulate.servers import Cores, Server
from kvxfer.bench.simulate.shape import ClusterShape

COSTS = Costs(
    front_request_s=1e-3,
    front_delivery_s=1e-4,
    front_token_s=1e-5,
    hop_s=2e-4,
    decode_control_s=4e-4,
    prefill_control_s=6e-4,
    message_s=2e-5,
    prefill_chunk_s=2e-3,
    prefill_token_s=2e-4,
    prefill_context_s=1e-7,
    lane_s=1e-3,
    lane_bytes_per_s=1e9,
    first_token_s=5e-4,
    decode_step_s=7e-3,
    decode_sequence_s=5e-4,
    decode_context_s=1e-6,
    growth_s=5e-3,
    growth_block_s=1e-5,
    kv_token_bytes=4096,
)
FREE = Costs(
    front_request_s=0.0, front_delivery_s=0.0, front_token_s=0.0, decode_control_s=0.0,
    prefill_control_s=0.0, prefill_chunk_s=0.0, prefill_token_s=1e-12, lane_s=0.0,
    lane_bytes_per_s=1e15, decode_step_s=1e-9, decode_sequence_s=0.0, kv_token_bytes=1.0,
)  # fmt: skip
"""All but nothing costs anything."""
SHAPE = ClusterShape(prefill=1, decode=1, prefill_blocks=1000, decode_blocks=1000)


def run(shape: ClusterShape, costs: Costs, load: list[Shape], seed: int = 0) -> tuple[Cluster, Any]:
    cluster = Cluster(shape, costs, seed)
    return cluster, cluster.run(load)


def check_conserved(cluster: Cluster, requests: list[Request]) -> None:
    assert all(one.is_over for one in requests)
    assert cluster.num_under_way == 0
    for one in requests:
        if one.state is State.REFUSED:
            assert one.why
            continue
        assert one.told == one.num_output
        assert one.due_s <= one.sent_s < one.first_s <= one.last_s
    for worker in [*cluster.prefills, *cluster.decodes]:
        cache = worker.cache
        assert cache.used == 0
        assert 0 < cache.committed <= cache.shape.capacity
        assert cache.peak <= cache.committed
    for decode in cluster.decodes:
        assert not decode.running
    assert all(one.tokens_queued == 0 for one in cluster.prefills)


def test_a_request_alone_waits_for_nothing() -> None:
    """Its first token comes after the sum of what it costs, in both kinds of cores."""
    costs, tokens = COSTS, 600
    chunks = [costs.chunk_s(256, 0), costs.chunk_s(256, 256), costs.chunk_s(88, 512)]
    controls = (costs.decode_control_s + costs.prefill_control_s) / 2
    known = costs.front_request_s + 2 * costs.hop_s + controls + sum(chunks)
    told = 2 * costs.hop_s + costs.first_token_s + costs.front_delivery_s + costs.front_token_s
    for cores in (0, 8):
        shape = replace(SHAPE, cores=cores)
        _, [one] = run(shape, replace(costs, message_s=0.0), [Shape(1.0, tokens, 3)])
        assert one.first_s - one.sent_s == pytest.approx(known + told, rel=1e-9)
        moved = costs.transfer_s(88 * 4096)
        proved = known + max(moved, 0) + 2 * costs.hop_s + controls
        steps = costs.step_s(1, tokens) + costs.step_s(1, tokens + 1)
        last = costs.hop_s + costs.front_delivery_s + costs.front_token_s
        assert one.last_s - one.sent_s == pytest.approx(proved + steps + last, rel=1e-9)


def test_the_wait_for_prefill_is_that_of_a_queue_with_equal_services() -> None:
    """M/D/1: at use r the mean wait is r / (2 (1 - r)) services (Pollaczek and Khinchine)."""
    service_s, use, count = 0.1, 0.6, 6_000
    costs = replace(FREE, prefill_chunk_s=service_s)
    pauses = np.random.default_rng(1).exponential(service_s / use, count)
    load = [Shape(float(at), 1, 1) for at in np.cumsum(pauses)]
    shape = replace(SHAPE, max_num_queued=count, prefill_blocks=count, decode_blocks=count)
    _, requests = run(shape, costs, load)
    waits = [one.first_s - one.sent_s - service_s for one in requests]
    assert np.mean(waits) == pytest.approx(service_s * use / (2 * (1 - use)), rel=0.05)


@pytest.mark.parametrize(
    ("costs", "per_s"),
    [
        (replace(FREE, prefill_chunk_s=0.05), 2 / 0.05),
        (replace(FREE, front_request_s=0.01), 1 / 0.01),
        (replace(FREE, decode_step_s=0.02), 8 / (0.02 * 9)),
        (replace(FREE, lane_bytes_per_s=1000.0), 1000 / 100),
    ],
    ids=["prefill", "router", "decode", "links"],
)
def test_with_too_much_load_the_slowest_stage_says_how_much_is_served(
    costs: Costs, per_s: float
) -> None:
    """2 prefill workers, and one that decodes 8 at once; 100 tokens a prompt, 10 an answer, 9 of
    them decoded."""
    count = 320
    shape = replace(SHAPE, prefill=2, max_num_seqs=8, max_num_queued=count)
    shape = replace(shape, prefill_blocks=count * 7, decode_blocks=count * 7)
    cluster, requests = run(shape, costs, [Shape(0.0, 100, 10)] * count)
    assert count / cluster.env.now == pytest.approx(per_s, rel=0.05)
    check_conserved(cluster, requests)


def test_what_binds_is_named() -> None:
    load = [Shape(0.0, 100, 10)] * 100
    for costs, name in (
        (replace(FREE, prefill_chunk_s=0.05), "prefill: model"),
        (replace(FREE, front_request_s=0.01), "router"),
        (replace(FREE, decode_step_s=0.02), "decode: "),
        (replace(FREE, lane_bytes_per_s=1000.0), "links"),
    ):
        cluster, requests = run(replace(SHAPE, prefill=2, decode=2, max_num_seqs=4), costs, load)
        assert outcome(cluster, requests, {}).binding.name.startswith(name)


def test_a_batch_with_room_does_not_bind() -> None:
    """However busy its model is: a fuller one would compute more."""
    costs = replace(FREE, decode_step_s=0.02)
    cluster, requests = run(replace(SHAPE, max_num_seqs=100), costs, [Shape(0.0, 9, 300)])
    uses = {one.name: one.mean for one in outcome(cluster, requests, {}).uses}
    assert uses["decode: model, in full batches"] == pytest.approx(0.01, rel=0.01)


def test_several_routers_serve_more() -> None:
    costs = replace(FREE, front_request_s=0.01, front_token_s=0.01)
    load = [Shape(0.0, 9, 4)] * 300
    for routers in (1, 4):
        cluster, requests = run(replace(SHAPE, routers=routers), costs, load)
        assert cluster.env.now == pytest.approx(300 * 5 * 0.01 / routers, rel=0.05)
        check_conserved(cluster, requests)


def test_a_small_cache_preempts_and_loses_nothing() -> None:
    shape = replace(SHAPE, decode_blocks=24, max_num_seqs=8)
    cluster, requests = run(shape, COSTS, [Shape(0.01 * at, 60, 150) for at in range(20)])
    assert sum(one.num_preempted for one in requests) > 0
    check_conserved(cluster, requests)


def test_an_elastic_cache_grows_as_blocks_run_low() -> None:
    shape = replace(SHAPE, decode_blocks=320, is_elastic=True, prefill=2)
    cluster, requests = run(shape, COSTS, [Shape(0.0, 60, 100)] * 16)
    cache = cluster.decodes[0].cache
    assert cache.num_growths > 0
    assert 20 < cache.committed <= 320
    check_conserved(cluster, requests)


def test_heartbeats_of_many_peers_keep_control_threads_busy() -> None:
    costs = replace(FREE, message_s=1e-4)
    load = [Shape(float(at), 8, 2) for at in range(30)]
    cluster, requests = run(replace(SHAPE, decode=20), costs, load)
    pause_s = cluster.shape.peer_timeout_s / 6
    uses = {use.name: use.mean for use in outcome(cluster, requests, {}).uses}
    assert uses["prefill: control thread"] == pytest.approx(4 * 20 * 1e-4 / pause_s, rel=0.1)
    assert uses["decode: control thread"] == pytest.approx(4 * 1e-4 / pause_s, rel=0.1)


def test_a_closed_loop_keeps_its_bound() -> None:
    shape = replace(SHAPE, max_concurrency=3)
    cluster, requests = run(shape, COSTS, [Shape(0.0, 50, 20)] * 12)
    for one in requests:
        there = sum(two.sent_s <= one.sent_s < two.last_s for two in requests)
        assert there <= 3
    check_conserved(cluster, requests)


def test_too_long_and_too_many_are_refused() -> None:
    shape = replace(SHAPE, decode_blocks=10, max_num_queued=5)
    cluster, requests = run(shape, COSTS, [Shape(0.0, 161, 1)] + [Shape(0.0, 100, 9)] * 30)
    assert requests[0].why == "too long"
    assert sum(one.why == "overloaded" for one in requests) > 0
    assert sum(one.state is State.ENDED for one in requests) >= 5
    check_conserved(cluster, requests)


def test_the_same_seed_gives_the_same_numbers() -> None:
    shape = replace(SHAPE, prefill=3, decode=3, cores=4)
    load = [Shape(0.02 * at, 30 + 7 * at % 90, 1 + at % 13) for at in range(60)]
    found = [run(shape, COSTS, load, seed)[1] for seed in (5, 5, 6)]
    times = [[(one.first_s, one.last_s, one.prefill) for one in requests] for requests in found]
    assert times[0] == times[1] != times[2]


def test_cores_are_shared_evenly() -> None:
    env = simpy.Environment()
    cores, ends = Cores(env, 2), {}

    def job(name: str, at_s: float, work_s: float) -> Any:
        yield env.timeout(at_s)
        yield cores.run(work_s)
        ends[name] = env.now

    for one in (("a", 0.0, 2.0), ("b", 0.0, 2.0), ("c", 0.0, 1.0)):
        env.process(job(*one))
    env.run()
    assert ends == pytest.approx({"c": 1.5, "a": 2.5, "b": 2.5})
    assert cores.busy_s == pytest.approx(5.0)


def test_neighbours_on_other_cores_slow_one_down() -> None:
    env = simpy.Environment()
    cores = Cores(env, 2, crowding=0.5)
    jobs = [cores.run(1.0), cores.run(1.0)]
    env.run(jobs[0] & jobs[1])
    assert env.now == pytest.approx(1.5)


@pytest.mark.parametrize("num_cores", [0, 1])
def test_a_server_takes_one_at_a_time(num_cores: int) -> None:
    env = simpy.Environment()
    server = Server(env, Cores(env, num_cores) if num_cores else None)
    ends: list[float] = []
    for work_s in (1.0, 0.0, 2.0):
        server.then(work_s, ends.append)
    env.run()
    assert ends == pytest.approx([1.0, 1.0, 3.0])
    assert server.work_s == 3.0


SIZES = st.integers(1, 90)
CLUSTERS = st.builds(
    ClusterShape,
    prefill=st.integers(1, 4),
    decode=st.integers(1, 4),
    cores=st.sampled_from([0, 0, 1, 3]),
    chunk_tokens=st.sampled_from([16, 64]),
    max_num_seqs=st.integers(1, 5),
    max_num_queued=st.sampled_from([2, 1000]),
    block_size=st.sampled_from([1, 8, 16]),
    prefill_blocks=st.integers(6, 60),
    decode_blocks=st.integers(6, 60),
    is_elastic=st.booleans(),
    workers_per_link=st.integers(1, 3),
    fabric_bytes_per_s=st.sampled_from([0.0, 1e6]),
    max_concurrency=st.sampled_from([0, 2]),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    CLUSTERS,
    st.lists(st.tuples(st.floats(0, 0.1), SIZES, SIZES), max_size=25),
    st.sampled_from([COSTS, FREE]),
)
def test_no_request_is_lost_and_no_time_is_negative(
    shape: ClusterShape, rows: list[tuple[float, int, int]], costs: Costs
) -> None:
    at_s, load = 0.0, []
    for pause_s, num_input, num_output in rows:
        at_s += pause_s
        load.append(Shape(at_s, num_input, num_output))
    cluster, requests = run(shape, costs, load)
    check_conserved(cluster, requests)
    for use in outcome(cluster, requests, {}).uses:
        assert 0 <= use.mean <= use.most <= 1
        assert math.isfinite(use.mean)
