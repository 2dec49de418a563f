"""How a worker leaves: by order, by its own word, by signals; in time, and at once."""

import pytest
from support.peering import both_ready, idle_pair

from kvxfer.control.messages import Goodbye
from kvxfer.control.router_messages import Drain
from kvxfer.worker.draining import Draining, DrainState
from kvxfer.worker.pace import Pace


def made(cluster, **options):
    worker = cluster.add("prefill", idle=True, **options)
    return worker, worker.parts.draining


def test_a_router_may_order_it_and_it_is_over_when_nothing_is_left(cluster):
    worker, draining = made(cluster)
    router = cluster.connect_router(worker)
    draining.tick(False, False)
    assert draining.state is DrainState.SERVING
    router._channel.send(router.backends[0].key, Drain("the host goes away"))
    cluster.until(lambda: draining.state is DrainState.DRAINING)
    assert worker.parts.status()["is_draining"] == 1
    cluster.until(lambda: router.backends[0].state.name == "DRAINING")
    for busy in ((True, True), (False, True)):
        draining.tick(*busy)
        assert draining.state is DrainState.DRAINING
    draining.tick(False, False)
    assert (draining.state, draining.is_clean) == (DrainState.OVER, True)
    assert draining.reason == "the host goes away"


def test_a_stranger_may_not_order_it(cluster):
    worker, draining = made(cluster)
    wire = cluster.wire("decode")
    wire.dial(worker)
    before = worker.loop._num_wrong
    cluster.until(lambda: wire.says(Drain("now")))
    cluster.until(lambda: worker.loop._num_wrong > before)
    assert draining.state is DrainState.SERVING


def test_a_peer_that_drains_is_not_an_order(cluster):
    prefill, decode = idle_pair(cluster)
    cluster.until(both_ready(prefill, decode))
    prefill.parts.draining.begin("a test")
    cluster.until(lambda: decode.peers.ready()[0].is_draining)
    assert decode.parts.draining.state is DrainState.SERVING


@pytest.mark.parametrize("timeout_s, state", [(0.0, "OVER"), (60.0, "DRAINING")])
def test_a_signal_ends_it_at_once_or_has_it_drain(cluster, timeout_s, state):
    _, draining = made(cluster, shutdown_timeout_s=timeout_s)
    draining.stop()
    draining.tick(True, True)
    assert draining.state.name == state
    draining.stop()
    draining.tick(True, True)
    assert (draining.state, draining.is_clean) == (DrainState.OVER, False)


def test_a_signal_gives_it_so_long_and_no_longer(cluster, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kvxfer.worker.draining.time.monotonic", lambda: now[0])
    worker, _ = made(cluster)
    draining = Draining(worker.options, worker.peers)
    draining._shutdown_timeout_s = 5.0
    draining.stop()
    for now[0] in (100.0, 104.9):
        draining.tick(True, True)
        assert draining.state is DrainState.DRAINING
    now[0] = 105.0
    draining.tick(True, True)
    assert (draining.state, draining.is_clean) == (DrainState.OVER, False)


def test_blocks_that_somebody_may_write_to_are_not_waited_for_without_end(cluster, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kvxfer.worker.draining.time.monotonic", lambda: now[0])
    worker, _ = made(cluster, transfer_timeout_s=30.0)
    draining = Draining(worker.options, worker.peers)
    draining.begin("a test")
    for now[0], serving in ((150.0, True), (151.0, False), (180.9, False)):
        draining.tick(serving, True)
        assert draining.state is DrainState.DRAINING
    now[0] = 181.1
    draining.tick(False, True)
    assert (draining.state, draining.is_clean) == (DrainState.OVER, False)


def test_who_left_with_nothing_under_way_is_owed_nothing_and_answered(cluster):
    prefill, decode = idle_pair(cluster)
    cluster.until(both_ready(prefill, decode))
    fenced = []
    decode.peers.on_fenced = fenced.append
    prefill.peers.farewell("drained", is_quiet=True)
    cluster.until(lambda: prefill.peers.is_alone)
    assert fenced == ["prefill-0"]
    assert decode.peers.holders.names() == []
    cluster.turn_for(0.05)
    assert prefill.peers.is_alone, "it meets nobody any more"


def test_a_farewell_of_another_kind_proves_nothing(cluster):
    prefill, decode = idle_pair(cluster)
    cluster.until(both_ready(prefill, decode))
    decode.channel.send(decode.peers.ready()[0].key, Goodbye("bye", False))
    cluster.until(lambda: prefill.peers.holders.names() == ["decode-0"])


def test_pace_is_a_mean_of_tokens_a_second():
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert pace.tokens_per_s == 0
    for took_s, tokens in ((0.5, 100), (0.5, 100), (0.1, 20)):
        pace.begin()
        now[0] += took_s
        pace.end(tokens)
    assert pace.tokens_per_s == pytest.approx(200)
    pace.begin()
    now[0] += 1.0
    pace.end(40)
    assert pace.tokens_per_s == pytest.approx(1 / 0.0075), "the newest weighs an eighth"
