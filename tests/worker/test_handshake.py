"""Who may be a peer of whom, and how it is told."""

import pytest
from support.peering import Events, answers, both_ready, dialled, idle_pair
from support.workers import SPEC

from kvxfer.cache.spec import KVCacheSpec
from kvxfer.control.messages import WIRE_VERSION, Hello, RegionsAck, RegionsUpdate
from kvxfer.errors import HandshakeRejected
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.regions import Region

LANES = [
    ("auto", "auto", Direction.PUSH),
    ("push", "auto", Direction.PUSH),
    ("auto", "pull", Direction.PULL),
    ("pull", "pull", Direction.PULL),
]


@pytest.mark.parametrize("ours, theirs, direction", LANES)
def test_a_handshake_makes_both_ready_with_one_direction(cluster, ours, theirs, direction):
    prefill, decode = idle_pair(cluster, {"lane": ours}, {"lane": theirs})
    seen = Events(prefill), Events(decode)
    cluster.until(both_ready(prefill, decode))
    (at_prefill,), (at_decode,) = prefill.peers.ready(), decode.peers.ready()
    assert at_prefill.direction is at_decode.direction is direction
    assert (at_prefill.name, at_decode.name) == ("decode-0", "prefill-0")
    assert at_prefill.regions == decode.parts.growth.regions
    assert at_decode.regions == prefill.parts.growth.regions
    assert [(e.ready, e.lost) for e in seen] == [(["decode-0"], []), (["prefill-0"], [])]
    cluster.until(lambda: not decode.peers.laggards(1) and not prefill.peers.laggards(1))


def spec_with(**changes):
    fields = {name: getattr(SPEC, name) for name in KVCacheSpec.__slots__}
    return KVCacheSpec(**fields | changes)


DIFFERENT = {
    "model": {"engine": {"fingerprint": "0" * 32}},
    "num_layers": {"engine": {"specs": [spec_with(num_layers=3)]}},
    "num_kv_heads": {"engine": {"specs": [spec_with(num_kv_heads=4)]}},
    "head_dim_k": {"engine": {"specs": [spec_with(head_dim_k=32, head_dim_v=0)]}},
    "dtype": {"engine": {"specs": [spec_with(dtype="bfloat16")]}},
    "block_size": {"engine": {"specs": [spec_with(block_size=6)]}},
    "lane": {"lane": "pull"},
}


@pytest.mark.parametrize("field", DIFFERENT)
def test_who_does_not_fit_is_refused_by_name_and_the_listener_lives_on(cluster, field):
    changed = DIFFERENT[field]
    prefill, decode = idle_pair(cluster, {"lane": "push"}, changed)
    with pytest.raises(HandshakeRejected, match=f"refused: {field} differs") as refused:
        cluster.until(both_ready(prefill, decode))
    assert refused.value.field == field
    assert prefill.peers.ready() == []
    cluster.remove(decode)
    good = cluster.add("decode", idle=True, worker_id="good")
    good.peers.dial(prefill.address)
    cluster.until(both_ready(prefill, good))


def test_reject_tells_each_side_its_own_value(cluster):
    prefill, _ = idle_pair(cluster, {"lane": "push"}, {"lane": "pull"})
    with pytest.raises(HandshakeRejected) as refused:
        cluster.until(lambda: bool(prefill.peers.ready()))
    assert (refused.value.ours, refused.value.theirs) == ("pull", "push")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_two_workers_of_one_role_are_refused(cluster, role):
    one = cluster.add(role, idle=True)
    other = cluster.add(role, idle=True, worker_id="other")
    other.peers.dial(one.address)
    with pytest.raises(HandshakeRejected, match="role differs"):
        cluster.until(both_ready(one, other))


def test_layouts_capacities_and_granularities_may_differ(cluster):
    prefill, decode = idle_pair(
        cluster,
        {"engine": {"layout": "LHBNC", "capacity": 32}},
        {"engine": {"layout": "BLNHC", "capacity": 80}},
    )
    cluster.until(both_ready(prefill, decode))


def test_another_wire_version_is_refused_by_name(cluster):
    prefill, wire = dialled(cluster)
    wire.send(Hello(WIRE_VERSION + 1, None))
    cluster.until(answers(wire, "Reject"))
    reject = wire.received[-1]
    assert reject.field == "wire_version"
    assert (reject.ours, reject.theirs) == (str(WIRE_VERSION + 1), str(WIRE_VERSION))
    wire.send(wire.hello())
    cluster.until(answers(wire, "Welcome"))
    assert prefill.peers.ready()


def test_a_repeated_hello_is_answered_again_and_changes_nothing(cluster):
    prefill, wire = dialled(cluster)
    seen = Events(prefill)
    for count in (1, 2, 3):
        wire.send(wire.hello())
        cluster.until(answers(wire, "Welcome", count))
    assert seen.ready == ["decode-0"]
    assert seen.lost == seen.fenced == []
    assert len(prefill.peers.ready()) == 1
    assert prefill.peers.ready()[0].regions == wire.regions


WRONG_FACTS = {
    "lane": {"lanes": ["loopback/sideways"]},
    "role": {"role": "spectator"},
    "connector": {"lanes": ["pigeon/push"]},
    "base address": {"base_address": -1},
    "huge base address": {"base_address": 2**64 - 1},
    "description": {"description": b"scribble"},
    "no description": {"description": b""},
}


@pytest.mark.parametrize("changes", WRONG_FACTS.values(), ids=WRONG_FACTS)
def test_wrong_facts_cost_the_peer_its_session_and_not_the_worker_its_life(cluster, changes):
    prefill, wire = dialled(cluster, on_peer_loss="wait")
    wire.send(wire.hello(**changes))
    cluster.turn_for(0.1)
    assert prefill.peers.ready() == []
    wire.send(wire.hello())
    cluster.until(answers(wire, "Welcome"))
    assert len(prefill.peers.ready()) == 1


def bad_regions(wire, kind):
    total = wire.cache.geometry.total_bytes
    return {
        "beyond the cache": [Region(total, 4096)],
        "across its end": [Region(total - 4096, 8192)],
        "huge": [Region(2**64 - 4096, 4096)],
        "overlapping": [*wire.regions.regions, wire.regions.regions[0]],
        "unsorted": [Region(8192, 4096), Region(0, 4096)],
    }[kind]


KINDS = ["beyond the cache", "across its end", "huge", "overlapping", "unsorted"]


@pytest.mark.parametrize("kind", KINDS)
def test_regions_that_cannot_be_are_refused_in_hello(cluster, kind):
    prefill, wire = dialled(cluster)
    wire.send(wire.hello(regions=bad_regions(wire, kind)))
    cluster.until(answers(wire, "Reject"))
    assert prefill.peers.ready() == []


@pytest.mark.parametrize("kind", KINDS[:4])
def test_regions_that_cannot_be_are_refused_in_an_update(cluster, kind):
    prefill, wire = dialled(cluster)
    seen = Events(prefill)
    wire.send(wire.hello())
    cluster.until(answers(wire, "Welcome"))
    wire.send(RegionsUpdate(2, bad_regions(wire, kind), [b""], 0))
    cluster.until(lambda: bool(seen.lost))
    assert prefill.peers.ready() == []


def test_an_update_that_is_known_is_acknowledged_again(cluster):
    prefill, wire = dialled(cluster)
    wire.send(wire.hello())
    cluster.until(answers(wire, "Welcome"))
    cluster.until(answers(wire, "RegionsAck"))
    for generation in (1, 0):
        wire.send(RegionsUpdate(generation, [], [wire.connector.describe([])], 0))
    cluster.until(answers(wire, "RegionsAck", 3))
    assert {ack.generation for ack in wire.of(RegionsAck)} == {1}
    assert prefill.peers.ready()[0].regions == wire.regions
