"""Liveness and region exchange between workers whose roles do nothing."""

import time

import pytest
from support.peering import Events, answers, both_ready, dialled, idle_pair

from kvxfer.control.messages import Goodbye, Hello, RegionsAck, RegionsUpdate, Reject
from kvxfer.control.router_messages import Cancel, StatusQuery
from kvxfer.control.session import PeerState
from kvxfer.errors import WorkerDied
from kvxfer.worker import liveness

ELASTIC = {"kv_commit": "elastic", "kv_initial_blocks": 8, "engine": {"capacity": 256}}


@pytest.mark.parametrize("grower", ["prefill", "decode"])
def test_growth_is_published_loaded_and_acknowledged(cluster, grower):
    prefill, decode = idle_pair(cluster, **ELASTIC)
    cluster.until(both_ready(prefill, decode))
    worker, other = (prefill, decode) if grower == "prefill" else (decode, prefill)
    for wanted in (20, 50, 100):
        worker.parts.growth.request([wanted])
        cluster.until(lambda w=wanted: worker.pools.num_blocks[0] >= w)
        regions = worker.parts.growth.regions
        assert other.peers.ready()[0].regions == regions
        assert worker.peers.ready()[0].acked_generation == regions.generation
        known = other.connector._peers[other.peers.ready()[0].key]
        assert known.regions.regions == regions.regions


@pytest.mark.parametrize("grower", ["prefill", "decode"])
@pytest.mark.parametrize("turns", range(8))
def test_growth_while_the_peer_is_still_greeting(cluster, grower, turns):
    """However far the handshake has come, both end up knowing every region."""
    prefill, decode = idle_pair(cluster, **ELASTIC)
    worker = prefill if grower == "prefill" else decode
    for _ in range(turns):
        cluster.turn()
        time.sleep(0.002)
    worker.parts.growth.request([30])
    cluster.until(lambda: worker.pools.num_blocks[0] >= 30)
    worker.parts.growth.request([60])
    cluster.until(both_ready(prefill, decode))
    cluster.until(lambda: worker.pools.num_blocks[0] >= 60)
    for one, other in ((prefill, decode), (decode, prefill)):
        regions = one.parts.growth.regions
        cluster.until(lambda o=other, r=regions: o.peers.ready()[0].regions == r)
        cluster.until(
            lambda o=other, r=regions: (
                o.connector._peers[o.peers.ready()[0].key].regions.regions == r.regions
            )
        )
        cluster.until(lambda o=one, r=regions: not o.peers.laggards(r.generation))


def test_silence_loses_a_peer_once(cluster):
    prefill, decode = idle_pair(cluster, peer_timeout_s=0.4)
    seen = Events(prefill)
    cluster.until(both_ready(prefill, decode))
    cluster.workers.remove(decode)  # it is not turned any more: alive, and silent
    cluster.turn_for(0.9)
    cluster.workers.append(decode)
    assert seen.lost == [("decode-0", "nothing heard for 0.4 s")]
    assert prefill.peers.ready() == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_long_forward_pass_does_not_look_like_death(cluster, role):
    prefill, decode = cluster.pair("push", peer_timeout_s=1.2)
    sessions = [worker.peers.ready()[0].session for worker in (prefill, decode)]
    computing = prefill if role == "prefill" else decode
    computing.runner.hold()
    sent = cluster.send(decode)
    cluster.turn_for(1.7)
    assert [worker.peers.ready()[0].session for worker in (prefill, decode)] == sessions
    computing.runner.release()
    cluster.finish(sent)
    sent.check_equal()


def test_heartbeats_keep_idle_peers(cluster):
    prefill, decode = idle_pair(cluster, peer_timeout_s=0.4)
    seen = Events(prefill), Events(decode)
    cluster.until(both_ready(prefill, decode))
    cluster.turn_for(1.2)
    assert [e.lost for e in seen] == [[], []]


def test_peers_find_each_other_again_after_silence(cluster):
    prefill, decode = idle_pair(cluster, peer_timeout_s=0.4)
    seen = Events(prefill), Events(decode)
    cluster.until(both_ready(prefill, decode))
    cluster.workers.remove(prefill)
    cluster.turn_for(0.6)
    assert seen[1].lost
    cluster.workers.append(prefill)
    cluster.until(both_ready(prefill, decode))
    assert seen[1].ready == ["prefill-0"] * 2
    assert seen[1].fenced == [], "it was the same process all the time"


def test_exit_on_peer_loss_ends_the_worker(cluster):
    prefill, decode = idle_pair(cluster, decode={"on_peer_loss": "exit", "peer_timeout_s": 0.3})
    seen = Events(decode)
    cluster.until(both_ready(prefill, decode))
    cluster.workers.remove(prefill)
    with pytest.raises(WorkerDied, match=r"prefill-0 is lost: nothing heard for 0\.3 s"):
        cluster.turn_for(3.0)
    cluster.workers.append(prefill)
    assert len(seen.lost) == 1


def test_goodbye_is_a_loss_and_no_death(cluster):
    prefill, decode = idle_pair(cluster, decode={"on_peer_loss": "exit"})
    seen = Events(decode)
    cluster.until(both_ready(prefill, decode))
    prefill.peers.farewell("it was told to stop")
    cluster.until(lambda: bool(seen.lost))
    assert seen.lost == [("prefill-0", "it left: it was told to stop")]


def test_a_restarted_dialler_replaces_its_former_self(cluster):
    prefill, decode = idle_pair(cluster)
    seen = Events(prefill)
    cluster.until(both_ready(prefill, decode))
    cluster.remove(decode)
    again = cluster.add("decode", idle=True)
    again.peers.dial(prefill.address)
    cluster.until(lambda: bool(again.peers.ready()))
    assert [name for name, _ in seen.lost] == ["decode-0"]
    assert seen.fenced == ["decode-0"]
    (peer,) = prefill.peers.ready()
    assert peer.facts.incarnation == again.incarnation
    assert seen.ready == ["decode-0"] * 2


def test_a_restarted_listener_is_found_and_its_former_self_fenced(cluster):
    prefill, decode = idle_pair(cluster, decode={"peer_timeout_s": 0.5})
    seen = Events(decode)
    cluster.until(both_ready(prefill, decode))
    address, old = prefill.address, prefill.incarnation
    cluster.remove(prefill)
    again = cluster.add("prefill", idle=True, listen=address)
    cluster.until(lambda: bool(again.peers.ready()) and bool(decode.peers.ready()))
    (peer,) = decode.peers.ready()
    assert peer.facts.incarnation == again.incarnation != old
    assert seen.fenced == ["prefill-0"]
    assert len(seen.lost) == 1


def test_a_peer_that_is_gone_is_not_believed(cluster):
    prefill, wire = dialled(cluster)
    wire.send(wire.hello())
    cluster.until(answers(wire, "Welcome"))
    prefill.peers.lose(prefill.peers.ready()[0].key, "the test says so")
    wire.send(RegionsUpdate(2, [], [wire.connector.describe([])], 0))
    cluster.turn_for(0.05)
    assert prefill.peers.ready() == []
    assert prefill.peers.get("out:nobody") is None


def test_a_transport_that_will_not_connect_is_tried_again_with_pauses(cluster, monkeypatch):
    monkeypatch.setattr(liveness, "HELLO_RETRY_S", 0.2)
    prefill, decode = idle_pair(cluster)
    decode.connector.refuse.add("connect")
    greeted = []
    on_hello = prefill.peers.greeting._on_hello
    prefill.loop._handlers[Hello] = lambda key, hello: (greeted.append(key), on_hello(key, hello))
    cluster.turn_for(0.9)
    assert 2 <= len(greeted) <= 6
    assert decode.peers.ready() == []
    decode.connector.refuse.clear()
    cluster.until(both_ready(prefill, decode))


def test_routers_are_peers_that_no_kv_flows_to(cluster):
    prefill, decode = idle_pair(cluster)
    cluster.until(both_ready(prefill, decode))
    router = cluster.connect_router(prefill)
    backend = next(iter(router._backends.values()))
    assert backend.facts.worker_id == "prefill-0"
    assert [peer.name for peer in prefill.peers.ready()] == ["decode-0"]
    router._channel.send(backend.key, StatusQuery())
    cluster.until(lambda: bool(router._statuses))
    assert next(iter(router._statuses.values())).values["ticks"] > 0


def test_messages_for_others_and_from_strangers_are_dropped(cluster):
    prefill, wire = dialled(cluster)
    for message in (
        Cancel("x"),
        Goodbye("who?", False),
        RegionsAck(7),
        RegionsUpdate(1, [], [b""], 0),
        Reject("model", "a", "b"),
        wire.welcome("push"),
    ):
        wire.send(message)
    cluster.turn_for(0.05)
    wire.send(wire.hello())
    cluster.until(answers(wire, "Welcome"))
    assert prefill.peers.ready()[0].state is PeerState.READY
