"""Growth as the control thread sees it: what is usable was acknowledged by every peer."""

import itertools
import threading
import time

import pytest
from support.cluster import DEADLINE_S
from support.faulty import FaultyDriver
from support.service_processes import free_port, until
from support.workers import GRANULARITY

from kvxfer.cache.spec import KVCacheSpec
from kvxfer.control.messages import Hello, RegionsAck, RegionsUpdate, Welcome
from kvxfer.telemetry.trace import read_trace
from kvxfer.worker import growth as growth_module
from kvxfer.worker.growth import GrowthState

ELASTIC = {"kv_commit": "elastic", "kv_initial_blocks": 8, "engine": {"capacity": 256}}


def grown(worker, num_blocks):
    return lambda: worker.parts.growth.is_idle and worker.pools.num_blocks[0] >= num_blocks


def test_the_first_extension_is_exact_and_makes_generation_1(cluster):
    worker = cluster.add("prefill", **ELASTIC)
    assert worker.pools.num_blocks[0] == 8
    assert worker.parts.growth.regions.generation == 1
    worker.check_registered()


def test_all_is_committed_at_once_where_asked(cluster):
    worker = cluster.add("prefill", engine={"capacity": 40, "bound": 33})
    assert worker.pools.num_blocks[0] == 33
    worker.check_registered()


LARGE_BLOCKS = KVCacheSpec(
    num_layers=4, num_kv_heads=2, head_dim_k=16, head_dim_v=16, dtype="float32", block_size=4
)
"""A block fills a granule, where B is outermost."""


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("initial", [0, 1, 2])
def test_a_start_leaves_a_block_to_grant(cluster, layout, initial):
    """The null block alone would serve nobody, whatever a sixteenth of the budget comes to."""
    engine = {"capacity": 12, "layout": layout, "specs": [LARGE_BLOCKS]}
    worker = cluster.add("decode", kv_commit="elastic", kv_initial_blocks=initial, engine=engine)
    assert worker.pools.can_allocate([1])


class SlowDriver(FaultyDriver):
    def commit(self, address: int, size_bytes: int) -> int:
        time.sleep(0.02)
        return super().commit(address, size_bytes)


def test_who_dials_a_worker_that_starts_is_told_of_it_once_its_blocks_can_be_used(cluster):
    wire, address = cluster.wire("decode"), f"tcp://127.0.0.1:{free_port()}"
    wire.key = wire.channel.dial(address)
    heard = threading.Thread(
        target=lambda: until(lambda: wire.says(wire.hello()), DEADLINE_S, "a connection")
    )
    heard.start()
    prefill = cluster.add("prefill", listen=address, engine={"driver": SlowDriver(GRANULARITY)})
    heard.join()
    cluster.until(lambda: wire.of(Welcome))
    (welcome,) = wire.of(Welcome)
    assert (welcome.facts.generation, wire.of(RegionsUpdate)) == (1, [])
    assert welcome.facts.regions == list(prefill.parts.growth.regions.regions)


def test_generation_counts_additions_and_the_base_stays(cluster, tmp_path):
    path = tmp_path / "trace"
    worker = cluster.add("decode", trace=path, **ELASTIC)
    base, seen = worker.cache.buffer.base_address, [worker.parts.growth.regions.total_bytes]
    for generation in range(2, 6):
        wanted = worker.pools.num_blocks[0] + 1
        worker.parts.growth.request([wanted])
        cluster.until(grown(worker, wanted))
        assert worker.parts.growth.regions.generation == generation
        worker.check_registered()
        seen.append(worker.parts.growth.regions.total_bytes)
    assert worker.cache.buffer.base_address == base
    assert seen == sorted(set(seen))
    events = [event for event in read_trace(path) if event["event"] == "generation"]
    assert [event["generation"] for event in events] == [1, 2, 3, 4, 5]
    assert [event["registered_bytes"] for event in events] == seen
    assert all(event["committed_bytes"] == event["registered_bytes"] for event in events)
    for earlier, later in itertools.pairwise(events):
        assert earlier["new_blocks"] == later["old_blocks"]
        assert later["started_ns"] <= later["at_ns"]


def test_a_request_for_what_is_there_or_beyond_the_budget_does_nothing(cluster):
    worker = cluster.add("decode", engine={"capacity": 40, "bound": 33})
    for wanted in (0, 5, 33, 34, 1000):
        worker.parts.growth.request([wanted])
        assert worker.parts.growth.is_idle
    assert worker.parts.growth.regions.generation == 1


def test_growth_never_goes_beyond_the_budget(cluster):
    options = ELASTIC | {"engine": {"capacity": 256, "bound": 45}}
    worker = cluster.add("decode", **options)
    worker.parts.growth.request([200])
    cluster.until(grown(worker, 45))
    assert worker.pools.num_blocks[0] == 45
    worker.check_registered()


def test_a_failed_growth_changes_nothing_and_is_tried_again_later(cluster, monkeypatch):
    monkeypatch.setattr(growth_module, "RETRY_S", 0.15)
    worker = cluster.add("decode", **ELASTIC)
    asked = []
    worker.parts.growth.on_settled = lambda: asked.append(worker.parts.growth.request([20]))
    worker.engine.driver.fail_after = 0
    worker.parts.growth.request([20])
    cluster.turn_for(0.7)
    assert worker.pools.num_blocks[0] == 8
    assert worker.parts.growth.regions.generation == 1
    assert 2 <= worker.engine.driver.num_refused <= 6, "with a pause each time"
    worker.check_registered()
    worker.engine.driver.fail_after = -1
    cluster.until(grown(worker, 20))
    worker.check_registered()


def test_memory_is_measured_anew_at_each_step(cluster, monkeypatch):
    """What is free now bounds a step, and one that it does not pay for is refused, not tried."""
    monkeypatch.setattr(growth_module, "RETRY_S", 0.1)
    worker = cluster.add("prefill", **ELASTIC)
    block_bytes = worker.cache.geometry.groups[0].spec.block_bytes
    committed = worker.cache.committed_blocks[0]
    worker.engine.driver.free_bytes = 3 * block_bytes
    worker.parts.growth.request([committed + 4])
    assert "pays for" in worker.parts.growth.problem
    assert worker.cache.committed_blocks[0] == committed
    cluster.turn_for(0.3)
    worker.parts.growth.request([committed + 2])
    cluster.until(grown(worker, committed + 2))
    assert worker.parts.growth.problem == ""
    worker.check_registered()


def test_however_often_it_is_asked_for_a_failed_growth_is_tried_now_and_then(cluster):
    worker = cluster.add("decode", **ELASTIC)
    worker.engine.driver.fail_after = 0
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        worker.parts.growth.request([20])
        cluster.turn()
    assert worker.engine.driver.num_refused == 1


def test_a_growth_that_cannot_be_registered_is_rolled_back(cluster):
    worker = cluster.add("decode", **ELASTIC)
    committed = worker.cache.committed_bytes
    worker.connector.refuse.add("register")
    worker.parts.growth.request([20])
    cluster.until(lambda: worker.parts.growth.is_idle)
    assert worker.cache.committed_bytes == committed
    assert worker.pools.num_blocks[0] == 8
    worker.check_registered()


def meet(cluster, **options):
    wire = cluster.wire("prefill", "tcp://127.0.0.1:0")
    decode = cluster.add("decode", **{**ELASTIC, **options})
    decode.peers.dial(wire.address)
    cluster.until(lambda: bool(wire.of(Hello)))
    wire.send(wire.welcome("push"))
    cluster.until(lambda: bool(decode.peers.ready()))
    return wire, decode


def test_new_blocks_are_used_only_when_the_peer_has_acknowledged(cluster):
    wire, decode = meet(cluster)
    wire.acks = False
    decode.parts.growth.request([20])
    cluster.until(lambda: bool(wire.of(RegionsUpdate)))
    update = wire.of(RegionsUpdate)[0]
    assert update.generation == 2
    assert set(update.regions) <= set(decode.parts.growth.regions.regions)
    cluster.turn_for(0.05)
    assert decode.parts.growth._state is GrowthState.PUBLISHING
    assert decode.pools.num_blocks[0] == 8
    wire.send(RegionsAck(1))
    cluster.turn_for(0.03)
    assert decode.pools.num_blocks[0] == 8, "that was the old generation"
    wire.send(RegionsAck(2))
    cluster.until(grown(decode, 20))
    assert decode.peers.ready()


def test_a_laggard_is_lost_at_the_deadline_and_growth_goes_on(cluster, monkeypatch):
    monkeypatch.setattr(growth_module, "ACK_TIMEOUT_S", 0.2)
    wire, decode = meet(cluster)
    wire.acks = False
    lost = []
    decode.peers.on_lost = lambda peer, reason: lost.append(reason)
    decode.parts.growth.request([20])
    cluster.until(grown(decode, 20))
    assert lost == ["no acknowledgement of new regions within 0.2 s"]
    assert decode.peers.ready() == []
    decode.check_registered()


def test_a_peer_that_leaves_is_waited_for_no_longer(cluster):
    from kvxfer.control.messages import Goodbye

    wire, decode = meet(cluster)
    wire.acks = False
    decode.parts.growth.request([20])
    cluster.until(lambda: bool(wire.of(RegionsUpdate)))
    wire.send(Goodbye("enough", False))
    cluster.until(grown(decode, 20))
