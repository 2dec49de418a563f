"""A peer that does not fit: who ends, and who lives on without it."""

import logging

import pytest
from support.peering import both_ready

from kvxfer.control.messages import Goodbye, Hello, Reject
from kvxfer.control.router_messages import StatusQuery
from kvxfer.errors import HandshakeRejected
from kvxfer.worker import liveness


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(liveness, "HELLO_RETRY_S", 0.05)


def refused(worker):
    """What Status says of peers that are refused, by address."""
    told = worker.role.status()
    return {name.partition("out:")[2]: why for name, why in told.items() if "refused" in name}


def prefill_of(cluster, name, **options):
    return cluster.add("prefill", worker_id=name, **options)


@pytest.mark.parametrize("good_first", [True, False])
def test_one_of_several_that_does_not_fit_is_left_out(cluster, caplog, good_first):
    good, bad = prefill_of(cluster, "good", lane="push"), prefill_of(cluster, "bad", lane="pull")
    decode = cluster.add("decode", lane="push")
    for one in (good, bad) if good_first else (bad, good):
        decode.peers.dial(one.address)
    cluster.until(lambda: bool(refused(decode) and decode.peers.ready()))
    assert list(refused(decode)) == [bad.address]
    assert "lane differs" in refused(decode)[bad.address]
    sent = cluster.send(decode)
    cluster.finish(sent)
    sent.check_equal()
    cluster.turn_for(0.1)
    assert caplog.text.count("it is greeted again, later and later") == 1
    cluster.until_idle()


def test_a_worker_that_all_refuse_at_its_start_ends_with_the_field(cluster):
    workers = [prefill_of(cluster, name, lane="pull") for name in ("one", "two")]
    decode = cluster.add("decode", lane="push")
    for one in workers:
        decode.peers.dial(one.address)
    with pytest.raises(HandshakeRejected, match="lane differs: ours 'push', theirs 'pull'"):
        cluster.turn_for(3.0)
    assert len(refused(decode)) == 2


def test_whoever_is_not_there_yet_may_still_fit(cluster):
    bad = prefill_of(cluster, "bad", lane="pull")
    decode = cluster.add("decode", lane="push")
    absent = prefill_of(cluster, "absent", lane="push")
    address = absent.address
    cluster.remove(absent)
    for one in (bad.address, address):
        decode.peers.dial(one)
    cluster.until(lambda: bool(refused(decode)))
    cluster.turn_for(0.1)
    assert not decode.peers.ready()
    late = prefill_of(cluster, "absent", lane="push", listen=address)
    cluster.until(both_ready(late, decode))


def test_a_peer_that_comes_back_otherwise_is_refused_until_it_is_set_right(cluster):
    prefill = cluster.add("prefill", lane="push")
    decode = cluster.add("decode", lane="push")
    decode.peers.dial(prefill.address)
    cluster.until(both_ready(prefill, decode))
    address = prefill.address
    cluster.remove(prefill)
    wrong = cluster.add("prefill", lane="pull", listen=address)
    decode.peers.lose(decode.peers.ready()[0].key, "the test says so")
    cluster.until(lambda: bool(refused(decode)))
    assert not decode.peers.ready()
    cluster.remove(wrong)
    right = cluster.add("prefill", lane="push", listen=address)
    cluster.until(both_ready(right, decode))
    assert not refused(decode)
    sent = cluster.send(decode)
    cluster.finish(sent)
    sent.check_equal()


def ready_with_another(cluster, **options):
    """A decode worker that is ready, and a wire that it dials besides."""
    good = cluster.add("prefill", lane="push", worker_id="good", **options)
    wire = cluster.wire("prefill", "tcp://127.0.0.1:0", lane="push", **options)
    decode = cluster.add("decode", lane="push", **options)
    for address in (good.address, wire.address):
        decode.peers.dial(address)
    cluster.until(both_ready(good, decode))
    cluster.until(lambda: bool(wire.of(Hello)))
    return wire, decode


UNFIT = {
    "wire_version": lambda wire: type(wire.welcome("push"))(99, wire.facts(), "loopback/push"),
    "lane": lambda wire: wire.welcome("pull"),
    "model": lambda wire: wire.welcome("push", model="0" * 32),
}


@pytest.mark.parametrize("field", UNFIT)
def test_a_welcome_that_does_not_fit_costs_nobody_but_its_sender(cluster, field):
    wire, decode = ready_with_another(cluster)
    wire.send(UNFIT[field](wire))
    cluster.until(lambda: bool(refused(decode)))
    assert f"{field} differs" in refused(decode)[wire.address]
    cluster.until(lambda: bool(wire.of(Goodbye)))
    assert [peer.name for peer in decode.peers.ready()] == ["good"]
    known = len(wire.of(Hello))
    cluster.until(lambda: len(wire.of(Hello)) > known)
    wire.send(wire.welcome("push"))
    cluster.until(lambda: len(decode.peers.ready()) == 2)
    assert not refused(decode)


def test_a_ready_peer_that_refuses_later_is_lost_and_nothing_else(cluster):
    wire, decode = ready_with_another(cluster)
    wire.send(wire.welcome("push"))
    cluster.until(lambda: len(decode.peers.ready()) == 2)
    for _ in range(3):
        wire.send(Reject("model", "a", "b"))
        cluster.turn_for(0.02)
    assert [peer.name for peer in decode.peers.ready()] == ["good"]
    assert list(refused(decode)) == [wire.address]
    wire.send(StatusQuery())  # whoever is refused is served like any stranger
    cluster.turn_for(0.02)


def test_lanes_too_slow_cost_a_worker_in_service_that_peer_alone(cluster, caplog):
    """The first one's are not tried."""
    caplog.set_level(logging.INFO)
    good = cluster.add("prefill", worker_id="good", lane_test=False)
    slow = cluster.add("prefill", worker_id="slow", lane_test=True)
    decode = cluster.add("decode", lane_test=True, min_lane_gbps=1e6)
    decode.peers.dial(good.address)
    cluster.until(both_ready(good, decode))
    decode.peers.dial(slow.address)
    cluster.until(lambda: bool(refused(decode)))
    assert "min_lane_gbps" in refused(decode)[slow.address]
    assert [peer.name for peer in decode.peers.ready()] == ["good"]
    cluster.until(lambda: "it left: refused" in caplog.text)
    cluster.until_idle()


def test_a_process_that_was_replaced_ends_though_it_served(cluster):
    prefill, old = cluster.add("prefill"), cluster.add("decode")
    old.peers.dial(prefill.address)
    cluster.until(both_ready(prefill, old))
    new = cluster.add("decode")
    new.peers.dial(prefill.address)
    with pytest.raises(HandshakeRejected, match="incarnation"):
        cluster.turn_for(5.0)
    cluster.remove(old)
    cluster.until(both_ready(prefill, new))


@pytest.mark.parametrize("num_sent, longest", [(1, 1.0), (4, 8.0), (6, 30.0), (999, 30.0)])
def test_who_is_refused_is_greeted_less_and_less(monkeypatch, num_sent, longest):
    monkeypatch.setattr(liveness, "HELLO_RETRY_S", 1.0)
    found = {liveness.hello_pause(num_sent, chance, is_refused=True) for chance in (0.0, 0.5)}
    assert found == {longest * 0.75, longest}
