"""Shrink, sleep, wake and defragment in workers that serve: who is waited for and told."""

import ctypes
import random
import threading

import pytest
from support.prefill_wire import granted, ready, settle_all
from support.prefill_wire import meet as meet_prefill

from kvxfer.control.cache_messages import (
    CacheState,
    Defragment,
    RegionsRevoke,
    RegionsRevoked,
    Shrink,
    Sleep,
    WakeUp,
)
from kvxfer.control.messages import Hello, RegionsUpdate
from kvxfer.control.resync_messages import RegionsQuery, RegionsState
from kvxfer.control.session import Peer
from kvxfer.errors import DriverError
from kvxfer.telemetry.trace import read_trace
from kvxfer.transfer.regions import Region
from kvxfer.worker import holders as holders_module
from kvxfer.worker import revocation as revocation_module
from kvxfer.worker.residency import ResidencyState

ELASTIC = {"kv_commit": "elastic", "kv_initial_blocks": 8}
STEPS = (16, 32, 48, 64)
both_lanes = pytest.mark.parametrize("lane", ["push", "pull"])
both_roles = pytest.mark.parametrize("role", ["prefill", "decode"])


def grow(cluster, worker, steps=STEPS):
    """In steps, so that each segment has many chunks."""
    for wanted in steps:
        worker.parts.growth.request([wanted])
        cluster.until(
            lambda wanted=wanted: (
                worker.parts.growth.is_idle and worker.pools.num_blocks[0] >= wanted
            )
        )


def asked(cluster, worker, name, *arguments, timeout_s=12.0):
    """The answer to a request that the worker's own code makes."""
    answers = []
    getattr(worker.parts.residency, name)(*arguments, answers.append)
    cluster.until(lambda: bool(answers), timeout_s)
    assert len(answers) == 1
    return answers[0]


def serve(cluster, decode, **more):
    sent = cluster.send(decode, **more)
    cluster.finish(sent)
    sent.check_equal()
    return sent


def check_peers_agree(owner, peer):
    """What the peer may reach is what the owner has registered."""
    (known,) = [found for found in peer.peers.ready() if found.name == owner.options.worker_id]
    assert known.regions.regions == owner.parts.growth.regions.regions
    (reachable,) = peer.connector._peers.values()
    assert reachable.regions.regions == owner.parts.growth.regions.regions


def state_of(worker):
    return worker.parts.residency.state


# --- the four requests ----------------------------------------------------------------------------


@both_lanes
@both_roles
def test_shrinking_gives_memory_back_and_tells_the_peers(cluster, lane, role):
    prefill, decode = cluster.pair(lane, **ELASTIC)
    owner, peer = (prefill, decode) if role == "prefill" else (decode, prefill)
    grow(cluster, owner)
    before = owner.cache.committed_bytes
    answer = asked(cluster, owner, "shrink", [20], 5.0)
    assert (answer.request, answer.problem, answer.is_sleeping) == ("Shrink", "", False)
    assert 20 <= answer.num_blocks[0] == owner.pools.num_blocks[0] < 64
    assert answer.committed_bytes == owner.cache.committed_bytes < before
    assert answer.tombstone_bytes == 0
    owner.check_conserved()
    check_peers_agree(owner, peer)
    serve(cluster, decode)
    cluster.until_idle()
    grow(cluster, owner, [64])
    serve(cluster, decode, num_tokens=100)
    cluster.until_idle()
    check_peers_agree(owner, peer)


@both_lanes
@both_roles
def test_a_prompt_after_sleep_and_wake_has_the_same_kv_and_tokens(cluster, lane, role):
    prefill, decode = cluster.pair(lane, **ELASTIC)
    owner, peer = (prefill, decode) if role == "prefill" else (decode, prefill)
    grow(cluster, owner)
    tokens = list(range(30))
    first = serve(cluster, decode, tokens=tokens, num_tokens=30)
    cluster.until_idle()
    many, base = len(owner.cache.buffer.chunks), owner.cache.buffer.base_address
    answer = asked(cluster, owner, "sleep", 5.0)
    assert (answer.problem, answer.is_sleeping) == ("", True)
    assert (answer.num_blocks[0], answer.committed_bytes) == (0, 0)
    assert owner.cache.buffer.chunks == ()
    assert owner.parts.growth.regions.regions == ()
    check_peers_agree(owner, peer)
    refused = cluster.send(decode)
    cluster.finish(refused)
    assert "the cache sleeps" in refused.finished.error
    cluster.until(cluster.idle)
    answer = asked(cluster, owner, "wake_up")
    assert (answer.problem, answer.is_sleeping, answer.num_blocks[0]) == ("", False, 64)
    assert len(owner.cache.buffer.chunks) < many
    assert owner.cache.buffer.base_address == base
    check_peers_agree(owner, peer)
    again = serve(cluster, decode, tokens=tokens, num_tokens=30)
    assert again.finished.kv_digests == first.finished.kv_digests
    assert again.completion.output == first.completion.output
    cluster.until_idle()


def test_each_request_leaves_a_trace_with_registered_equal_to_committed(cluster, tmp_path):
    worker = cluster.add("decode", trace=tmp_path / "trace", **ELASTIC)
    grow(cluster, worker)
    for call in (("shrink", [20], 1.0), ("sleep", 1.0), ("wake_up",), ("defragment", 1.0)):
        asked(cluster, worker, *call)
    events = [e for e in read_trace(tmp_path / "trace") if e["event"] == "residency"]
    assert [e["request"] for e in events] == ["Shrink", "Sleep", "WakeUp", "Defragment"]
    assert all(e["committed_bytes"] == e["registered_bytes"] for e in events)
    assert events[1]["committed_bytes"] == 0
    status = worker.role.status()
    assert (status["is_sleeping"], status["revocations"], status["tombstone_bytes"]) == (0, 3, 0)


def test_defragmenting_packs_and_publishes_what_there_is_now(cluster):
    prefill, decode = cluster.pair(**ELASTIC)
    for owner, peer in ((prefill, decode), (decode, prefill)):
        grow(cluster, owner)
        many = len(owner.parts.growth.regions.regions)
        answer = asked(cluster, owner, "defragment", 5.0)
        assert (answer.problem, answer.num_blocks[0]) == ("", 64)
        assert len(owner.parts.growth.regions.regions) == 2 < many
        check_peers_agree(owner, peer)
        serve(cluster, decode, num_tokens=60)
        cluster.until_idle()


def test_a_router_asks_and_is_answered(cluster):
    _, decode = cluster.pair(**ELASTIC)
    grow(cluster, decode)
    router = cluster.connect_router(decode)
    (backend,) = router._backends.values()
    found = []

    def ask():
        for request in (
            Shrink([20], 5.0),
            Sleep(5.0),
            Sleep(5.0),
            WakeUp(),
            WakeUp(),
            Defragment(1),
        ):
            found.append(router.manage(backend, request, 10.0))

    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        for worker in cluster.workers:
            worker.turn(0.001)
    thread.join()
    assert all(isinstance(state, CacheState) for state in found)
    problems = [(state.request, state.problem) for state in found]
    assert problems == [
        ("Shrink", ""),
        ("Sleep", ""),
        ("Sleep", "the cache sleeps"),
        ("WakeUp", ""),
        ("WakeUp", "the cache is awake"),
        ("Defragment", ""),
    ]
    serve(cluster, decode)
    cluster.until_idle()


WRONG = [
    (("shrink", [10, 10], 1.0), "[10, 10] blocks: the cache has 1 groups"),
    (("shrink", [1], 1.0), "[1] blocks: each group has"),
    (("shrink", [-5], 1.0), "[-5] blocks"),
    (("sleep", -1.0), "timeout_s: -1.0: 0 to 3600 s"),
    (("sleep", float("nan")), "timeout_s: nan"),
    (("defragment", 1e9), "timeout_s"),
    (("wake_up",), "the cache is awake"),
]


@pytest.mark.parametrize("call, problem", WRONG)
def test_what_cannot_be_is_answered_and_changes_nothing(cluster, call, problem):
    worker = cluster.add("decode", **ELASTIC)
    before = worker.parts.growth.regions
    assert problem in asked(cluster, worker, *call).problem
    assert state_of(worker) is ResidencyState.AWAKE
    assert worker.parts.growth.regions == before
    worker.check_conserved()


def test_shrinking_to_what_is_there_tells_nobody(cluster):
    wire, decode = meet_prefill(cluster, "push", **ELASTIC)
    assert asked(cluster, decode, "shrink", [60], 5.0).problem == ""
    assert wire.of(RegionsRevoke) == []
    decode.check_conserved()


# --- who is waited for ----------------------------------------------------------------------------


def hold(cluster, lane, **options):
    """A pair whose decode worker holds blocks for a sequence that does not move on."""
    prefill, decode = cluster.pair(lane, **ELASTIC)
    grow(cluster, decode)
    decode.runner.hold()
    sent = cluster.send(decode, **options)
    cluster.until(lambda: decode.pools.counts().used > 0)
    return prefill, decode, sent


@both_lanes
def test_a_sequence_above_the_bound_is_waited_for(cluster, lane):
    _, decode, sent = hold(cluster, lane, num_tokens=100)
    answers = []
    decode.parts.residency.shrink([10], 10.0, answers.append)
    cluster.turn_for(0.1)
    assert state_of(decode) is ResidencyState.DRAINING
    late = cluster.send(decode, num_tokens=100)
    cluster.turn_for(0.05)
    assert answers == []
    decode.runner.release()
    cluster.finish(sent, late)
    sent.check_equal()
    late.check_equal()
    assert answers[0].problem == ""
    assert answers[0].num_blocks[0] < 20
    assert decode.pools.num_blocks[0] > 20, "it grew again for the prompt that had to wait"
    cluster.until_idle()


@both_lanes
def test_a_sequence_below_the_bound_goes_on_undisturbed(cluster, lane):
    _, decode, sent = hold(cluster, lane, num_tokens=10)
    assert asked(cluster, decode, "shrink", [10], 5.0).problem == ""
    assert decode.pools.num_blocks[0] < 20
    assert sent.finished is None
    decode.runner.release()
    cluster.finish(sent)
    sent.check_equal()
    cluster.until_idle()


def test_at_the_deadline_a_shrink_goes_as_far_as_it_can(cluster):
    _, decode, sent = hold(cluster, "push", num_tokens=100)
    answer = asked(cluster, decode, "shrink", [10], 0.1)
    assert "cannot shrink to" in answer.problem
    assert "26 used and 0 quarantined" not in answer.problem, "only those above the bound"
    assert "block 26 the highest" in answer.problem
    assert 27 <= answer.num_blocks[0] == decode.pools.num_blocks[0] < 64
    decode.runner.release()
    cluster.finish(sent)
    sent.check_equal()
    cluster.until_idle()


@pytest.mark.parametrize("name", ["sleep", "defragment"])
def test_at_the_deadline_all_else_changes_nothing(cluster, name):
    _, decode, sent = hold(cluster, "push", num_tokens=10)
    before = decode.parts.growth.regions
    answer = asked(cluster, decode, name, 0.1)
    assert "cannot shrink to 1 blocks: above are 4 used" in answer.problem
    assert state_of(decode) is ResidencyState.AWAKE
    assert (answer.num_blocks[0], decode.parts.growth.regions) == (64, before)
    decode.runner.release()
    more = cluster.send(decode, num_tokens=200)
    cluster.finish(sent, more)
    more.check_equal()
    cluster.until_idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_prompts_that_wait_for_blocks_are_refused_when_the_cache_goes_to_sleep(cluster, role):
    prefill, decode = cluster.pair(engine={"capacity": 64})
    owner = prefill if role == "prefill" else decode
    owner.runner.hold()
    running = cluster.send(decode, num_tokens=100)
    cluster.until(lambda: owner.pools.counts().used > 0)
    waiting = cluster.send(decode, num_tokens=150 if role == "decode" else 90)
    cluster.turn_for(0.05)
    answers = []
    owner.parts.residency.sleep(10.0, answers.append)
    cluster.finish(waiting)
    assert waiting.finished.error.endswith("the cache sleeps")
    assert answers == []
    owner.runner.release()
    cluster.finish(running)
    running.check_equal()
    cluster.until(lambda: bool(answers))
    assert answers[0].problem == ""
    cluster.until(cluster.idle)


def test_quarantined_blocks_count_as_used(cluster):
    """A lost prefill worker may still write under its grant."""
    wire, decode = meet_prefill(cluster, "push", **ELASTIC, on_peer_loss="wait")
    granted(cluster, wire, decode)
    decode.peers.lose(wire.key if wire.key.startswith("out") else f"out:{wire.address}", "a test")
    assert decode.pools.counts().quarantined
    assert "quarantined" in asked(cluster, decode, "sleep", 0.05).problem
    assert state_of(decode) is ResidencyState.AWAKE
    assert decode.pools.counts().quarantined


def test_one_request_at_a_time(cluster):
    _, decode, sent = hold(cluster, "push")
    answers, refused = [], []
    decode.parts.residency.sleep(10.0, answers.append)
    cluster.turn_for(0.02)
    for call in ("sleep", "defragment"):
        getattr(decode.parts.residency, call)(1.0, refused.append)
    decode.parts.residency.shrink([4], 1.0, refused.append)
    decode.parts.residency.wake_up(refused.append)
    assert [answer.problem for answer in refused] == ["Sleep is under way"] * 4
    decode.runner.release()
    cluster.until(lambda: bool(answers))
    assert (answers[0].problem, sent.finished.error) == ("", "")
    assert asked(cluster, decode, "wake_up").problem == ""
    cluster.until_idle()


def test_a_growth_under_way_ends_first(cluster):
    wire, decode = meet_prefill(cluster, "push", **ELASTIC)
    wire.acks = False
    decode.parts.growth.request([40])
    cluster.until(lambda: bool(wire.of(RegionsUpdate)))
    assert "growing" in asked(cluster, decode, "sleep", 0.05).problem
    answers = []
    decode.parts.residency.sleep(5.0, answers.append)
    cluster.turn_for(0.05)
    assert wire.of(RegionsRevoke) == []
    wire.acks = True
    from kvxfer.control.messages import RegionsAck

    wire.send(RegionsAck(2))
    cluster.until(lambda: bool(answers))
    assert answers[0].problem == ""


# --- peers that do not let go ---------------------------------------------------------------------


def lose_at(cluster, monkeypatch, **options):
    monkeypatch.setattr(revocation_module, "ACK_TIMEOUT_S", 0.15)
    wire, decode = meet_prefill(cluster, "push", **ELASTIC, on_peer_loss="wait", **options)
    grow(cluster, decode)
    wire.acks = False
    return wire, decode


def test_memory_is_released_only_when_the_peer_has_let_go(cluster):
    wire, decode = meet_prefill(cluster, "push", **ELASTIC)
    grow(cluster, decode)
    wire.acks = False
    before, answers = decode.cache.committed_bytes, []
    decode.parts.residency.shrink([10], 5.0, answers.append)
    cluster.until(lambda: bool(wire.of(RegionsRevoke)))
    (revoke,) = wire.of(RegionsRevoke)
    cluster.turn_for(0.1)
    assert state_of(decode) is ResidencyState.REVOKING
    assert decode.cache.committed_bytes == before
    assert decode.pools.num_blocks[0] < 20, "but nobody is granted it any more"
    for epoch in (0, 2, -1):
        wire.send(RegionsRevoked(epoch))
    cluster.turn_for(0.05)
    assert answers == [], "that was no word of this revocation"
    wire.send(RegionsRevoked(revoke.epoch))
    cluster.until(lambda: bool(answers))
    assert answers[0].tombstone_bytes == 0
    released = sum(region.size for region in revoke.regions)
    assert decode.cache.committed_bytes == before - released
    wire.connector.disconnect("decode")
    wire.connector.connect("decode", decode.cache.buffer.base_address, revoke.descriptions[0])
    decode.check_conserved()


def test_a_peer_that_never_lets_go_is_lost_and_cannot_crash_the_owner(cluster, monkeypatch):
    wire, decode = lose_at(cluster, monkeypatch)
    answer = asked(cluster, decode, "shrink", [10], 5.0)
    assert decode.peers.ready() == []
    (revoke,) = wire.of(RegionsRevoke)
    assert answer.tombstone_bytes == sum(region.size for region in revoke.regions) > 0
    base = decode.cache.buffer.base_address
    kept = [view[: answer.num_blocks[0]].clone() for view in decode.cache.views[0]]
    for region in revoke.regions:
        ctypes.memset(base + region.offset, 0xAB, region.size)
    for view, before in zip(decode.cache.views[0], kept, strict=True):
        assert bool((view[: answer.num_blocks[0]] == before).all())
    decode.check_conserved()
    grow(cluster, decode, [64])
    assert decode.parts.residency.retired.tombstone_bytes == 0
    decode.check_conserved()


def test_who_was_greeted_and_never_answered_may_reach_memory_too(cluster, monkeypatch):
    """Its answer may have been lost; once it says who it is, it is as any peer that came back."""
    monkeypatch.setattr(revocation_module, "ACK_TIMEOUT_S", 0.15)
    wire = cluster.wire("prefill", "tcp://127.0.0.1:0", lane="push")
    wire.acks = False
    decode = cluster.add("decode", lane="push", on_peer_loss="wait", **ELASTIC)
    grow(cluster, decode)
    decode.peers.dial(wire.address)
    cluster.until(lambda: bool(wire.of(Hello)))
    assert asked(cluster, decode, "shrink", [20], 5.0).tombstone_bytes > 0
    wire.acks = True
    cluster.until(lambda: len(wire.of(Hello)) > 1)
    wire.send(wire.welcome("push"))
    cluster.until(lambda: bool(decode.peers.ready()))
    asked(cluster, decode, "shrink", [8], 5.0)
    cluster.until(lambda: decode.parts.residency.retired.tombstone_bytes == 0)
    decode.check_conserved()


def test_a_transfer_of_a_lost_peer_ends_in_an_error(cluster, monkeypatch):
    import numpy as np

    from kvxfer.transfer.connector import Direction
    from kvxfer.transfer.lanes import Lane
    from kvxfer.transfer.plan import TransferPlan

    wire, decode = lose_at(cluster, monkeypatch)
    facts = [m for m in wire.received if isinstance(m, RegionsUpdate)][-1]
    wire.connector.connect("decode", decode.cache.buffer.base_address, facts.descriptions[0])
    target = facts.regions[0]
    asked(cluster, decode, "shrink", [10], 5.0)
    column = [np.array([value]) for value in (wire.regions.regions[0].offset, target.offset, 64)]
    wire.connector.submit("decode", Lane("loopback", Direction.PUSH), TransferPlan.of_runs(*column))
    (result,) = wire.connector.poll()
    assert result.error is not None and "no registered region" in result.error


def test_tombstones_go_when_a_new_process_of_the_peer_says_hello(cluster, monkeypatch):
    wire, decode = lose_at(cluster, monkeypatch)
    assert asked(cluster, decode, "sleep", 5.0).tombstone_bytes > 0
    wire.acks = True
    cluster.until(lambda: len(wire.of(Hello)) > 1)
    wire.send(wire.welcome("push"))
    cluster.until(lambda: bool(decode.peers.ready()))
    cluster.turn_for(0.05)
    assert decode.parts.residency.retired.tombstone_bytes > 0, "the same process may still come"
    decode.peers.lose(wire.key if wire.key in decode.peers._peers else f"out:{wire.address}", "x")
    known = len(wire.of(Hello))
    cluster.until(lambda: len(wire.of(Hello)) > known)
    wire.send(wire.welcome("push", incarnation="another"))
    cluster.until(lambda: decode.parts.residency.retired.tombstone_bytes == 0)
    assert asked(cluster, decode, "wake_up").num_blocks[0] == 64
    decode.check_conserved()


def test_a_peer_that_lets_go_the_next_time_leaves_no_tombstone(cluster, monkeypatch):
    wire, decode = lose_at(cluster, monkeypatch)
    assert asked(cluster, decode, "shrink", [20], 5.0).tombstone_bytes > 0
    wire.acks = True
    cluster.until(lambda: len(wire.of(Hello)) > 1)
    wire.send(wire.welcome("push"))
    cluster.until(lambda: bool(decode.peers.ready()))
    asked(cluster, decode, "shrink", [8], 5.0)
    cluster.until(lambda: decode.parts.residency.retired.tombstone_bytes == 0)
    decode.check_conserved()


@both_lanes
def test_a_new_agent_follows_the_loss_of_a_peer_that_came_back(cluster, monkeypatch, lane):
    """What a transport kept of the lost connection goes with the old one; who was dialled follows
    in a while."""
    monkeypatch.setattr(holders_module, "GRACE_S", 0.1)
    prefill, decode = cluster.pair(lane, **ELASTIC)
    agent = decode.connector._epoch.name
    for epoch in (1, 2):
        prefill.peers.lose(prefill.peers.ready()[0].key, "the test says so")
        cluster.until(lambda epoch=epoch: decode.parts.residency.epoch == epoch)
        cluster.until(lambda: decode.parts.residency.retired.num_epochs == 0)
        cluster.until(lambda: state_of(decode) is ResidencyState.AWAKE)
        serve(cluster, decode)
        cluster.until_idle()
    assert decode.connector._epoch.name != agent
    cluster.until(lambda: prefill.parts.residency.epoch >= 1)
    cluster.until(lambda: prefill.parts.residency.retired.num_epochs == 0)
    check_peers_agree(decode, prefill)
    decode.check_conserved()


def test_a_request_that_comes_while_the_agent_is_renewed_waits_for_it(cluster):
    """Also where the peer had let go of all that it was told to."""
    wire, decode = meet_prefill(cluster, "push", **ELASTIC, on_peer_loss="wait")
    grow(cluster, decode)
    asked(cluster, decode, "shrink", [20], 5.0)
    (shrunk,) = wire.of(RegionsRevoke)
    wire.received.remove(shrunk)
    decode.peers.lose(f"out:{wire.address}", "the test says so")
    cluster.until(lambda: len(wire.of(Hello)) > 1)
    wire.send(RegionsRevoked(shrunk.epoch))
    cluster.turn_for(0.05)
    wire.acks = False
    wire.send(wire.welcome("push"))
    cluster.until(lambda: bool(wire.of(RegionsRevoke)))
    answers = []
    decode.parts.residency.sleep(5.0, answers.append)
    cluster.turn_for(0.05)
    (revoke,) = wire.of(RegionsRevoke)
    assert (answers, revoke.regions) == ([], [])
    decode.parts.residency.wake_up(answers.append)
    assert answers.pop().problem == "the cache is awake"
    wire.acks = True
    wire.send(RegionsRevoked(revoke.epoch))
    cluster.until(lambda: bool(answers))
    assert (answers[0].problem, answers[0].is_sleeping) == ("", True)
    assert decode.parts.residency.epoch == 3


def test_a_peer_that_stays_away_keeps_only_the_agents_that_it_knows(cluster, monkeypatch):
    """However often memory comes and goes meanwhile."""
    wire, decode = lose_at(cluster, monkeypatch)
    asked(cluster, decode, "sleep", 5.0)
    retired = decode.parts.residency.retired
    for _ in range(3):
        asked(cluster, decode, "wake_up")
        asked(cluster, decode, "sleep", 5.0)
    cluster.turn_for(0.05)
    assert retired.num_epochs == 2, "of the second it was told in vain"
    decode.peers.holders.met(Peer("in:x", 0.0), wire.facts(incarnation="another life"))
    cluster.until(lambda: retired.num_epochs == 0)


@both_roles
def test_an_agent_ends_once_its_lost_peer_has_met_the_next_one(cluster, monkeypatch, role):
    """The new one is begun while the peer is away: there is no revocation for it to acknowledge."""
    monkeypatch.setattr(revocation_module, "ACK_TIMEOUT_S", 0.1)
    prefill, decode = cluster.pair("push", **ELASTIC)
    owner, peer = (prefill, decode) if role == "prefill" else (decode, prefill)
    cluster.workers.remove(peer)  # it is not turned any more: alive, and silent
    owner.peers.lose(owner.peers.ready()[0].key, "the test says so")
    assert asked(cluster, owner, "shrink", [4], 5.0).tombstone_bytes >= 0
    assert owner.parts.residency.retired.num_epochs == 1
    cluster.workers.append(peer)
    cluster.until(lambda: bool(owner.peers.ready() and peer.peers.ready()))
    cluster.until(lambda: owner.parts.residency.retired.num_epochs == 0)
    serve(cluster, decode)


def test_where_there_are_no_tombstones_memory_stays_pinned(cluster, monkeypatch):
    """As on a GPU: the cache shrinks and sleeps all the same; what a lost peer may reach stays
    mapped, is nobody's, and goes when the peer is known to be dead."""
    wire, decode = lose_at(cluster, monkeypatch)
    monkeypatch.setattr(type(decode.engine.driver), "can_retire", False)
    before, base = decode.cache.committed_bytes, decode.cache.buffer.base_address
    answer = asked(cluster, decode, "sleep", 5.0)
    assert (answer.problem, answer.is_sleeping, answer.committed_bytes) == ("", True, 0)
    assert answer.pinned_bytes == before == decode.role.status()["pinned_bytes"]
    assert decode.parts.growth.regions.regions == ()
    assert ctypes.string_at(base, 1), "still mapped"
    refused = asked(cluster, decode, "wake_up")
    assert "may still reach" in refused.problem
    assert refused.is_sleeping
    decode.peers.holders.met(Peer("in:x", 0.0), wire.facts(incarnation="another life"))
    cluster.until(lambda: decode.parts.residency.retired.pinned_bytes == 0)
    assert asked(cluster, decode, "wake_up").problem == ""
    decode.check_conserved()


def test_what_a_lost_peer_may_touch_is_not_moved(cluster, monkeypatch):
    wire, decode = lose_at(cluster, monkeypatch)
    monkeypatch.setattr(type(decode.engine.driver), "can_retire", False)
    before = decode.parts.growth.regions
    answer = asked(cluster, decode, "defragment", 5.0)
    assert "may still reach" in answer.problem
    assert (answer.num_blocks[0], answer.is_sleeping) == (64, False)
    assert decode.parts.growth.regions.regions == before.regions
    assert decode.parts.growth.regions.generation == before.generation + 1
    decode.check_conserved()
    assert wire.of(RegionsRevoke)


# --- failures -------------------------------------------------------------------------------------


def test_a_cache_that_finds_no_memory_sleeps_on(cluster):
    _, decode = cluster.pair(**ELASTIC)
    grow(cluster, decode)
    asked(cluster, decode, "sleep", 5.0)
    decode.engine.driver.fail_after = 1
    answer = asked(cluster, decode, "wake_up")
    assert "commit failed" in answer.problem
    assert answer.is_sleeping
    assert decode.cache.buffer.chunks == ()
    decode.engine.driver.fail_after = -1
    decode.connector.refuse.add("register")
    answer = asked(cluster, decode, "wake_up")
    assert "register is refused" in answer.problem
    assert answer.is_sleeping
    decode.connector.refuse.clear()
    assert asked(cluster, decode, "wake_up").problem == ""
    serve(cluster, decode)
    cluster.until_idle()


def test_a_connector_that_cannot_revoke_ends_it_before_anybody_is_told(cluster):
    wire, decode = meet_prefill(cluster, "push", **ELASTIC)
    grow(cluster, decode)
    decode.connector.refuse.add("revoke")
    answers = []
    decode.parts.residency.sleep(5.0, answers.append)
    cluster.until(lambda: state_of(decode) is ResidencyState.RESTORING)
    decode.connector.refuse.clear()
    cluster.until(lambda: bool(answers))
    assert "revoke is refused" in answers[0].problem
    assert state_of(decode) is ResidencyState.AWAKE
    assert wire.of(RegionsRevoke) == []
    assert answers[0].num_blocks[0] == 64
    decode.check_conserved()


def test_memory_that_the_driver_does_not_take_back_is_no_end(cluster, monkeypatch):
    _, decode = cluster.pair(**ELASTIC)
    grow(cluster, decode)
    driver, real = decode.engine.driver, decode.engine.driver.decommit
    calls = []

    def once(address, size_bytes, handle):
        calls.append(address)
        if len(calls) == 3:
            raise DriverError("decommit", 5, "refused")
        real(address, size_bytes, handle)

    monkeypatch.setattr(driver, "decommit", once)
    answer = asked(cluster, decode, "shrink", [10], 5.0)
    assert "refused" in answer.problem
    assert state_of(decode) is ResidencyState.AWAKE
    cluster.until(lambda: decode.parts.growth.is_idle)
    serve(cluster, decode, num_tokens=100)
    cluster.until_idle()


def test_who_comes_while_the_cache_sleeps_works_with_it_later(cluster):
    prefill = cluster.add("prefill", **ELASTIC)
    grow(cluster, prefill)
    asked(cluster, prefill, "sleep", 5.0)
    decode = cluster.add("decode", **ELASTIC)
    decode.peers.dial(prefill.address)
    cluster.until(lambda: bool(prefill.peers.ready() and decode.peers.ready()))
    check_peers_agree(prefill, decode)
    assert asked(cluster, prefill, "wake_up").num_blocks[0] == 64
    check_peers_agree(prefill, decode)
    serve(cluster, decode)
    cluster.until_idle()


# --- what a revocation does to hand-overs ---------------------------------------------------------


def test_a_read_of_what_was_revoked_proves_nothing(cluster):
    wire, decode = meet_prefill(cluster, "pull", **ELASTIC)
    sent, request = granted(cluster, wire, decode)
    wire.send(ready(request, stop=4, final=False))
    cluster.until(lambda: decode.connector.num_submitted > 0)
    revoke = RegionsRevoke(1, list(wire.regions.regions), [wire.connector.describe([])])
    wire.send(revoke)
    cluster.until(lambda: sent.finished is not None)
    assert "revoked memory that it had leased" in sent.finished.error
    cluster.until(lambda: bool(wire.of(RegionsRevoked)))
    assert wire.of(RegionsRevoked) == [RegionsRevoked(1)]
    assert decode.peers.ready()[0].regions.regions == ()
    settle_all(cluster, wire)


def test_a_revocation_of_what_a_peer_does_not_know_makes_it_ask(cluster):
    """An update or a revocation before it was lost."""
    wire, decode = meet_prefill(cluster, "push", **ELASTIC, on_peer_loss="wait")
    wire.send(RegionsRevoke(1, [Region(0, 64)], [b""]))
    cluster.until(lambda: bool(wire.of(RegionsQuery)))
    assert wire.of(RegionsRevoked) == []
    left = list(wire.regions.regions)[:1]
    wire.send(RegionsState(1, 2, left, [wire.connector.describe(left)]))
    cluster.until(lambda: bool(wire.of(RegionsRevoked)))
    (peer,) = decode.peers.ready()
    assert (peer.epoch, peer.regions.generation, list(peer.regions.regions)) == (1, 2, left)
    wire.send(RegionsRevoke(1, [Region(0, 64)], [b""]))
    cluster.until(lambda: len(wire.of(RegionsRevoked)) == 2)
    assert decode.peers.ready() == [peer]


# --- everything at once ---------------------------------------------------------------------------


@both_lanes
def test_serving_through_any_sequence_of_requests(cluster, lane):
    prefill, decode = cluster.pair(lane, **ELASTIC)
    chance, base = random.Random(lane), decode.cache.buffer.base_address
    for _ in range(25):
        worker = chance.choice([prefill, decode])
        name = chance.choice(["shrink", "shrink", "sleep", "defragment"])
        sent = [cluster.send(decode, num_tokens=chance.randint(5, 90)) for _ in range(2)]
        cluster.turn_for(chance.random() * 0.02)
        arguments = ([chance.randint(2, 40)], 5.0) if name == "shrink" else (5.0,)
        answer = asked(cluster, worker, name, *arguments)
        assert answer.problem == ""
        cluster.finish(*sent)
        if name == "sleep":
            assert asked(cluster, worker, "wake_up").problem == ""
        for one in sent:
            if one.finished.error:
                assert name == "sleep"
                assert one.finished.error.endswith("the cache sleeps")
            else:
                one.check_equal()
        cluster.until_idle()
    assert decode.cache.buffer.base_address == base
    check_peers_agree(prefill, decode)
    check_peers_agree(decode, prefill)
