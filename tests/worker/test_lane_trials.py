"""Pairs that try their lanes out: real bytes through real caches, and what is concluded."""

import logging
import time

import pytest
from support.faulty import SlowLoopback

from kvxfer.control.lane_messages import LaneChosen, LanePush, LaneReady, LaneTrial
from kvxfer.control.messages import Welcome
from kvxfer.control.session import PeerState
from kvxfer.errors import HandshakeRejected
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.lane_costs import LaneCost
from kvxfer.transfer.lanes import Lane, best_of
from kvxfer.transfer.plan import TransferPlan
from kvxfer.worker.lane_trial import NUM_TRANSFERS


def tried(cluster, **changes):
    """A pair, ready, whose lanes were tried out."""
    return cluster.pair("auto", lane_test=True, **changes)


def lanes_of(*workers):
    return [worker.peers.ready()[0].lane for worker in workers]


PUSH, PULL = (Lane("loopback", direction) for direction in Direction)


@pytest.mark.parametrize("layouts", [("LBHNC", "LBHNC"), ("LHBNC", "BLNHC")])
def test_both_use_the_lane_that_was_quickest_and_say_how_quick(cluster, caplog, layouts):
    caplog.set_level(logging.INFO)
    engines = [{"engine": {"layout": layout}} for layout in layouts]
    prefill, decode = tried(cluster, prefill=engines[0], decode=engines[1])
    lane, same = lanes_of(prefill, decode)
    assert lane == same
    (peer,) = decode.peers.ready()
    assert peer.lane_gbps == prefill.peers.ready()[0].lane_gbps > 0
    assert f"lane to prefill-0: {lane} at" in caplog.text
    assert "one thread's memcpy here" in caplog.text
    assert "also tried" in caplog.text
    assert decode.role.status()["lane prefill-0"] == str(lane)
    cluster.until_idle()


def test_requests_are_served_by_the_lane_that_was_chosen(cluster):
    _, decode = tried(cluster)
    sent = cluster.send(decode, 24, 5)
    cluster.finish(sent)
    sent.check_equal()
    cluster.until_idle()


class OneWay(SlowLoopback):
    """Loopback that gets pulls wrong: it copies nothing and says that it is done."""

    def submit(self, peer, direction, plan):
        if direction is Direction.PULL:
            plan = TransferPlan(())
        return super().submit(peer, direction, plan)


class LateStarter(SlowLoopback):
    """Loopback whose first pull takes as long as connecting, mapping or compiling may."""

    def submit(self, peer, direction, plan):
        if direction is Direction.PULL and not hasattr(self, "sizes"):
            self.sizes = []
            time.sleep(0.06)
        if direction is Direction.PULL:
            self.sizes.append(plan.total_bytes)
        return super().submit(peer, direction, plan)


class NoWay(SlowLoopback):
    """Loopback that copies nothing and says that it is done."""

    def submit(self, peer, direction, plan):
        return super().submit(peer, direction, TransferPlan(()))


def replace(worker, kind):
    worker.engine.connector.connectors["loopback"].__class__ = kind


SECOND = {"engine": {"second": "second"}}
FREE, DEAR = LaneCost(0.0, 0.0, 0.0), LaneCost(1.0, 0.0, 1e-6)


def second_of(worker):
    return worker.engine.connector.connectors["second"]


def test_each_end_knows_what_the_lanes_cost_that_it_starts_transfers_by(cluster):
    prefill, decode = tried(cluster, **SECOND)
    for worker, direction in ((prefill, Direction.PUSH), (decode, Direction.PULL)):
        (peer,) = worker.peers.ready()
        wanted = {Lane(name, direction) for name in ("loopback", "second")}
        assert set(peer.lane_costs) == wanted
        assert all(cost.seconds(1 << 20, 1) > 0 for cost in peer.lane_costs.values())
    cluster.until_idle()


@pytest.mark.parametrize("direction", Direction)
def test_a_plan_goes_by_the_lane_that_costs_least(cluster, direction):
    workers = cluster.pair(str(direction), lane_test=True, **SECOND)
    mover = workers[direction is Direction.PULL]
    (peer,) = mover.peers.ready()
    settled, other = (Lane(name, direction) for name in ("loopback", "second"))
    for costs, taken in (({settled: FREE, other: DEAR}, 0), ({settled: DEAR, other: FREE}, 1)):
        peer.lane, peer.lane_costs = settled, costs
        before = [mover.connector.num_submitted, second_of(mover).num_submitted]
        sent = cluster.send(workers[1], 24, 5)
        cluster.finish(sent)
        sent.check_equal()
        after = [mover.connector.num_submitted, second_of(mover).num_submitted]
        assert [new > old for new, old in zip(after, before, strict=True)] == [not taken, taken]
        cluster.until_idle()


def test_a_first_transfer_that_takes_long_says_nothing_of_the_lane(cluster):
    prefill, decode = idle_pair(cluster)
    replace(decode, LateStarter)
    decode.peers.dial(prefill.address)
    cluster.until(ready(prefill, decode))
    sizes = decode.connector.sizes
    assert len(sizes) == 2 * NUM_TRANSFERS
    assert min(sizes) < max(sizes), "all of it was moved, too"
    cluster.until_idle()


def test_a_lane_that_failed_its_trial_is_no_choice_for_any_plan(cluster):
    """Prefill cannot see that bytes came wrong: decode says what proved to work."""
    prefill, decode = idle_pair(cluster, **SECOND)
    prefill.engine.connector.connectors["second"].__class__ = NoWay
    decode.engine.connector.connectors["second"].__class__ = NoWay
    decode.peers.dial(prefill.address)
    cluster.until(ready(prefill, decode))
    for worker, lane in ((prefill, PUSH), (decode, PULL)):
        (peer,) = worker.peers.ready()
        assert set(peer.lane_costs) == {lane}
    cluster.until_idle()


def idle_pair(cluster, **changes):
    prefill = cluster.add("prefill", lane="auto", lane_test=True, **changes)
    decode = cluster.add("decode", lane="auto", lane_test=True, **changes)
    return prefill, decode


def ready(*workers):
    return lambda: all(worker.peers.ready() for worker in workers)


def test_a_lane_that_delivers_wrong_bytes_is_never_used(cluster, caplog):
    prefill, decode = idle_pair(cluster)
    replace(decode, OneWay)
    decode.peers.dial(prefill.address)
    cluster.until(ready(prefill, decode))
    assert lanes_of(prefill, decode) == [PUSH, PUSH]
    assert "loopback/pull to prefill-0 does not work: it delivered wrong bytes" in caplog.text
    cluster.until_idle()


def test_a_pair_of_whose_lanes_none_works_stays_apart_and_nothing_leaks(cluster, caplog):
    prefill, decode = idle_pair(cluster)
    for worker in (prefill, decode):
        worker.connector.refuse.add("submit")
    decode.peers.dial(prefill.address)
    cluster.until(lambda: "no lane works" in caplog.text)
    assert not decode.peers.ready()
    for worker in (prefill, decode):
        worker.connector.refuse.clear()
    cluster.until(ready(prefill, decode))
    cluster.until_idle()


def test_without_free_blocks_the_lanes_are_not_tried(cluster, caplog):
    caplog.set_level(logging.INFO)
    prefill, decode = idle_pair(cluster)
    held = decode.pools.allocate([decode.pools.groups[0].num_free])
    decode.peers.dial(prefill.address)
    cluster.until(ready(prefill, decode))
    assert "were not tried: no blocks are free here" in caplog.text
    assert lanes_of(prefill, decode) == [PUSH, PUSH]
    decode.pools.free(held)
    cluster.until_idle()


def test_a_lane_slower_than_asked_for_is_refused(cluster):
    prefill, decode = idle_pair(cluster, min_lane_gbps=1e6, peer_timeout_s=1.5)
    decode.peers.dial(prefill.address)
    with pytest.raises(HandshakeRejected, match="min_lane_gbps") as refused:
        cluster.until(ready(prefill, decode))
    assert "loopback" in str(refused.value)
    cluster.remove(decode)
    cluster.until(lambda: prefill.is_idle())


def test_a_worker_that_does_not_try_lanes_out_is_not_asked_to(cluster):
    prefill = cluster.add("prefill", lane="auto", lane_test=True)
    decode = cluster.add("decode", lane="auto", lane_test=False)
    decode.peers.dial(prefill.address)
    cluster.until(ready(prefill, decode))
    assert lanes_of(prefill, decode) == [PUSH, PUSH]


def test_a_prefill_that_goes_away_meanwhile_leaves_nothing_behind(cluster):
    prefill, decode = idle_pair(cluster)
    decode.connector.moving.clear()
    decode.peers.dial(prefill.address)
    cluster.until(lambda: decode.connector.num_submitted > 0)
    cluster.remove(prefill)
    decode.peers.lose(next(iter(decode.peers._peers)), "the test says so")
    assert decode.pools.counts().quarantined > 0
    decode.connector.moving.set()
    cluster.until(lambda: decode.pools.counts().quarantined == 0)


def test_prefill_gives_its_blocks_back_when_decode_falls_silent(cluster):
    prefill = cluster.add("prefill", lane="auto", lane_test=True)
    wire = cluster.wire("decode", lane="auto", lane_test=True)
    wire.dial(prefill)
    cluster.until(lambda: wire.says(wire.hello()))
    cluster.until(lambda: bool(wire.of(Welcome)))
    wire.send(LaneTrial("t" * 16, 8, [1, 2]))
    cluster.until(lambda: bool(wire.of(LaneReady)))
    assert prefill.pools.counts().used == 2
    assert not prefill.peers.ready()
    prefill.peers.lose(wire_key(prefill), "the test says so")
    cluster.until(lambda: prefill.pools.counts().used == 0)


def wire_key(worker):
    (key,) = worker.peers._peers
    return key


WRONG = {
    "no whole blocks": LaneTrial("t" * 16, 6, [1, 2]),
    "fewer blocks": LaneTrial("t" * 16, 8, [1]),
    "a block twice": LaneTrial("t" * 16, 8, [1, 1]),
    "the null block": LaneTrial("t" * 16, 8, [0, 1]),
    "beyond the capacity": LaneTrial("t" * 16, 8, [1, 1 << 40]),
    "no tokens": LaneTrial("t" * 16, 0, []),
    "a push without a trial": LanePush("t" * 16, "loopback/push", 8),
    "an unknown lane": LaneChosen("t" * 16, "pigeon/push", 1.0, []),
    "no lane": LaneChosen("t" * 16, "sideways", 1.0, []),
    "an unknown lane that works": LaneChosen("t" * 16, "loopback/push", 1.0, ["pigeon/push"]),
}


@pytest.mark.parametrize("message", WRONG.values(), ids=WRONG)
def test_a_wrong_word_costs_the_peer_its_session_and_nothing_else(cluster, message):
    prefill = cluster.add("prefill", lane="auto", lane_test=True)
    wire = cluster.wire("decode", lane="auto", lane_test=True)
    wire.dial(prefill)
    cluster.until(lambda: wire.says(wire.hello()))
    cluster.until(lambda: bool(wire.of(Welcome)))
    (peer,) = prefill.peers._peers.values()
    wire.send(message)
    cluster.until(lambda: peer.state is PeerState.GONE)
    prefill.check_conserved()
    assert prefill.pools.counts().used == 0


def test_of_lanes_that_are_about_as_quick_the_first_is_best():
    lanes = [PULL, PUSH]
    assert best_of(lanes, {PULL: 9.5, PUSH: 10.0}) == PULL
    assert best_of(lanes, {PULL: 5.0, PUSH: 10.0}) == PUSH
    assert best_of(lanes, {PUSH: 0.1}) == PUSH
    assert best_of(lanes, {}) is None


def test_blocks_of_a_push_that_nobody_answered_for_come_back_with_the_next_trial(cluster):
    """The answer was lost with the connection; that prefill takes a new trial proves its end."""
    prefill, decode = idle_pair(cluster)
    decode.peers.dial(prefill.address)
    cluster.until(lambda: bool(decode.role._lane_trials._trials))
    cluster.until(lambda: any(t.is_written for t in decode.role._lane_trials._trials.values()))
    for worker in (prefill, decode):
        worker.peers.lose(next(iter(worker.peers._peers)), "the test says so")
    cluster.until(ready(prefill, decode))
    cluster.until(lambda: decode.pools.counts().quarantined == 0)
    cluster.until_idle()


def test_a_pair_that_meets_again_agrees_whatever_it_chose_before(cluster):
    """Prefill remembers the lane of the session before; decode asks for the first one again."""
    prefill, decode = tried(cluster)
    (peer,) = prefill.peers.ready()
    peer.lane = next(lane for lane in peer.lanes if lane != peer.lanes[0])
    decode.peers.lose(decode.peers.ready()[0].key, "the test says so")
    cluster.until(lambda: bool(decode.peers.ready()) and len(set(lanes_of(prefill, decode))) == 1)
    sent = cluster.send(decode, 24, 5)
    cluster.finish(sent)
    sent.check_equal()
    cluster.until_idle()
