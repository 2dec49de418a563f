"""A prefill worker in front of a decode worker that the test plays, message by message."""

import time

import pytest
from support.decode_wire import GRANTED, OTHER_TOKENS, TOKENS, ask, greet, meet, settled
from support.null_runner import Reference
from support.workers import SPEC

from kvxfer.control.cache_messages import RegionsRevoke, RegionsRevoked
from kvxfer.control.messages import (
    Abort,
    Aborted,
    Confirmed,
    Done,
    Failed,
    FirstToken,
    Ready,
    Taken,
    Welcome,
)
from kvxfer.errors import ControlError
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.digest import block_digests
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.plan import CacheSide, plan_transfer
from kvxfer.transfer.regions import RegionSet

both_lanes = pytest.mark.parametrize("lane", ["push", "pull"])


def pull(cluster, wire, offers):
    """What a decode worker does with Ready: reads, into its own blocks."""
    facts = wire.of(Welcome)[-1].facts
    for ready in offers:
        regions = RegionSet(tuple(facts.regions), 1)
        source = CacheSide(facts.geometry.groups[0], regions, ready.lease.blocks[0])
        target = CacheSide(wire.cache.geometry.groups[0], wire.regions, GRANTED[0])
        plan = plan_transfer(source, target, range(ready.start, ready.stop))
        ticket = wire.connector.submit(facts.worker_id, Lane("loopback", Direction.PULL), plan)
        deadline = time.monotonic() + 5
        while ticket not in {result.ticket for result in wire.connector.poll()}:
            assert time.monotonic() < deadline


def check_arrived(wire):
    reference = Reference([SPEC], TOKENS, 1)
    assert block_digests(wire.cache.views[0], GRANTED[0], len(TOKENS)) == reference.digests
    return reference.tokens[0]


def test_push_writes_every_byte_before_it_says_done(cluster):
    prefill, wire = meet(cluster, "push")
    name, grant = ask(wire)
    cluster.until(lambda: bool(wire.of(Done)))
    done = wire.of(Done)[0]
    assert (done.request_id, done.grant_id) == (name, grant)
    assert (done.num_tokens, done.num_layers) == (len(TOKENS), SPEC.num_layers)
    assert wire.of(FirstToken) == [FirstToken(name, grant, check_arrived(wire))]
    assert done.transfer.num_bytes == len(TOKENS) * SPEC.block_bytes // SPEC.block_size
    settled(cluster, prefill)


def test_done_waits_for_the_last_write(cluster):
    prefill, wire = meet(cluster, "push")
    prefill.connector.moving.clear()
    ask(wire)
    cluster.until(lambda: prefill.connector.num_submitted == 3)
    cluster.turn_for(0.05)
    assert wire.of(Done) == []
    assert prefill.pools.counts().used == 5
    prefill.connector.moving.set()
    cluster.until(lambda: bool(wire.of(Done)))
    check_arrived(wire)
    settled(cluster, prefill)


def test_pull_offers_chunks_in_order_and_confirms_what_was_taken(cluster):
    prefill, wire = meet(cluster, "pull")
    name, grant = ask(wire)
    cluster.until(lambda: len(wire.of(Ready)) == 3)
    offers = wire.of(Ready)
    assert [(o.start, o.stop, o.final) for o in offers] == [
        (0, 8, False),
        (8, 16, False),
        (16, 18, True),
    ]
    assert {o.lease.lease_id for o in offers} == {grant}
    pull(cluster, wire, offers)
    cluster.turn_for(0.03)
    assert prefill.pools.counts().used == 5, "the lease holds until it is taken"
    wire.send(Taken(name, grant))
    cluster.until(lambda: bool(wire.of(Confirmed)))
    first = check_arrived(wire)
    assert wire.of(Confirmed)[0] == Confirmed(name, grant, first, None)
    assert wire.of(FirstToken) == [FirstToken(name, grant, first)]
    settled(cluster, prefill)


@both_lanes
@pytest.mark.parametrize("state", ["waiting", "computing", "handing over"])
def test_an_abort_is_answered_once_nothing_is_written_any_more(cluster, lane, state):
    prefill, wire = meet(cluster, lane, engine={"bound": 8})
    if state == "waiting":
        prefill.runner.hold()
        ask(wire, "first")
    elif state == "computing":
        prefill.runner.hold()
    else:
        prefill.connector.moving.clear()
    name, grant = ask(wire, "second")
    job_states = {"waiting": "WAITING", "computing": "COMPUTING", "handing over": "HANDING_OVER"}

    def reached():
        jobs = {job.request.request_id: job for job in prefill.role._jobs.values()}
        return "second" in jobs and jobs["second"].state.name == job_states[state]

    cluster.until(reached)
    wire.send(Abort(name, grant, "changed our mind"))
    cluster.turn_for(0.05)
    held_up = state == "computing" or (state == "handing over" and lane == "push")
    assert bool(wire.of(Aborted)) is not held_up
    prefill.runner.release()
    prefill.connector.moving.set()
    cluster.until(lambda: bool(wire.of(Aborted)))
    assert wire.of(Aborted) == [Aborted(name, grant)]
    if state == "waiting":
        wire.send(Abort("first", "grant-first", "this one too"))
    settled(cluster, prefill)
    assert wire.of(Failed) == []


@both_lanes
def test_an_abort_of_what_is_over_is_answered_too(cluster, lane):
    prefill, wire = meet(cluster, lane)
    wire.send(Abort("never", "heard of", "why"))
    cluster.until(lambda: bool(wire.of(Aborted)))
    assert wire.of(Aborted) == [Aborted("never", "heard of")]
    settled(cluster, prefill)


def test_an_abort_of_whom_it_has_not_met_is_not_answered(cluster):
    """It was granted to somebody who was at this address before, and may still write."""
    prefill, wire = cluster.add("prefill"), cluster.wire("decode")
    wire.dial(prefill)
    cluster.until(lambda: wire.says(Abort("never", "heard of", "why")))
    cluster.turn_for(0.05)
    assert not wire.of(Aborted)
    greet(cluster, wire)
    wire.send(Abort("never", "heard of", "why"))
    cluster.until(lambda: bool(wire.of(Aborted)))


def test_an_abort_names_a_grant_and_leaves_others_alone(cluster):
    prefill, wire = meet(cluster, "push")
    prefill.runner.hold()
    ask(wire, "same", grant="old")
    wire.send(Abort("same", "old", "router left"))
    ask(wire, "same", grant="new")
    cluster.turn_for(0.03)
    prefill.runner.release()
    cluster.until(lambda: bool(wire.of(Done)))
    assert wire.of(Aborted) == [Aborted("same", "old")]
    assert wire.of(Done)[0].grant_id == "new"
    check_arrived(wire)
    settled(cluster, prefill)


def test_a_deadline_while_writes_are_in_flight_is_told_when_they_are_over(cluster):
    prefill, wire = meet(cluster, "push")
    prefill.connector.moving.clear()
    ask(wire, timeout_s=0.3)
    cluster.until(lambda: prefill.connector.num_submitted == 3)
    cluster.turn_for(0.4)
    assert wire.of(Failed) == wire.of(Done) == []
    assert prefill.pools.counts().used == 5
    prefill.connector.moving.set()
    cluster.until(lambda: bool(wire.of(Failed)))
    assert "deadline" in wire.of(Failed)[0].reason
    settled(cluster, prefill)


def test_a_deadline_in_the_queue(cluster):
    prefill, wire = meet(cluster, "pull", engine={"bound": 8})
    name, grant = ask(wire, "first")
    cluster.until(lambda: any(ready.final for ready in wire.of(Ready)))
    ask(wire, "second", tokens=OTHER_TOKENS, timeout_s=0.2)
    cluster.until(lambda: bool(wire.of(Failed)))
    assert wire.of(Failed)[0].request_id == "second"
    wire.send(Taken(name, grant))
    cluster.until(lambda: bool(wire.of(Confirmed)))
    settled(cluster, prefill)


@both_lanes
def test_a_peer_that_leaves_takes_its_jobs_with_it(cluster, lane):
    prefill, wire = meet(cluster, lane, engine={"bound": 8})
    prefill.runner.hold()
    for name in ("a", "b", "c"):
        ask(wire, name)
    cluster.until(lambda: prefill.role.status()["jobs"] == 3)
    prefill.peers.lose(prefill.peers.ready()[0].key, "the test says so")
    prefill.runner.release()
    settled(cluster, prefill)
    greet(cluster, wire)
    name, grant = ask(wire, "d")
    cluster.until(lambda: bool(wire.of(Done) or any(ready.final for ready in wire.of(Ready))))
    wire.send(Abort(name, grant, "enough"))
    settled(cluster, prefill)


@pytest.mark.parametrize("aborted_first", [True, False])
def test_an_abort_is_answered_though_the_peer_was_lost_meanwhile(cluster, aborted_first):
    """The decode worker lives, and its blocks wait for this one word."""
    prefill, wire = meet(cluster, "push")
    prefill.connector.moving.clear()
    name, grant = ask(wire)
    cluster.until(lambda: prefill.connector.num_submitted == 3)
    if not aborted_first:
        prefill.peers.lose(prefill.peers.ready()[0].key, "the test says so")
    wire.send(Abort(name, grant, "changed our mind"))
    cluster.turn_for(0.05)
    if aborted_first:
        prefill.peers.lose(prefill.peers.ready()[0].key, "the test says so")
    assert wire.of(Aborted) == []
    prefill.connector.moving.set()
    cluster.until(lambda: bool(wire.of(Aborted)))
    assert wire.of(Aborted) == [Aborted(name, grant)]
    settled(cluster, prefill)


def test_waiting_for_blocks_at_the_bound_does_not_grow_without_end(cluster):
    """Nothing is left to grow into: the queue waits for blocks, quietly."""
    prefill, wire = meet(cluster, "pull", engine={"bound": 8})
    grown = prefill.parts.growth.regions.generation
    name, grant = ask(wire, "first")
    ask(wire, "second", tokens=OTHER_TOKENS)
    cluster.until(lambda: any(ready.final for ready in wire.of(Ready)))
    cluster.turn_for(0.2)
    assert prefill.parts.growth.regions.generation == grown
    wire.send(Taken(name, grant))
    cluster.until(lambda: len(wire.of(Ready)) == 6)
    wire.send(Taken("second", "grant-second"))
    cluster.until(lambda: len(wire.of(Confirmed)) == 2)
    settled(cluster, prefill)


def test_memory_that_cannot_be_had_is_asked_for_now_and_then_only(cluster):
    elastic = {"kv_commit": "elastic", "kv_initial_blocks": 2, "engine": {"capacity": 200}}
    prefill, wire = meet(cluster, "push", **elastic)
    prefill.engine.driver.fail_after = 0
    many = [list(range(1, 61))]
    ask(wire, tokens=[1] * 240, blocks=many, timeout_s=1.2)
    cluster.until(lambda: bool(wire.of(Failed)))
    assert 1 <= prefill.engine.driver.num_refused <= 5
    prefill.engine.driver.fail_after = -1
    ask(wire, "again", tokens=[1] * 240, blocks=many)
    cluster.until(lambda: bool(wire.of(Done)))
    settled(cluster, prefill)


def test_a_grant_in_memory_that_was_revoked_is_given_up(cluster):
    prefill, wire = meet(cluster, "push")
    prefill.runner.hold()
    ask(wire)
    cluster.until(lambda: prefill.role.status()["jobs"] == 1)
    chunks = wire.regions.regions
    wire.send(RegionsRevoke(1, list(chunks), [wire.connector.describe([])]))
    cluster.until(lambda: bool(wire.of(RegionsRevoked)))
    assert prefill.peers.ready()[0].regions.regions == ()
    prefill.runner.release()
    settled(cluster, prefill)
    cluster.until(lambda: bool(wire.of(Failed)))
    (failed,) = wire.of(Failed)
    assert "revoked memory that it had granted" in failed.reason
    assert wire.of(Done) == []


@pytest.mark.parametrize("lane", ["push", "pull"])
def test_a_last_word_that_cannot_be_sent_ends_the_request_once(cluster, lane):
    """Telling decode loses it, and that gives up all of its jobs, this one too."""
    prefill, wire = meet(cluster, lane)
    send = prefill.channel.send

    def cut(peer, message):
        if isinstance(message, Done | Confirmed):
            raise ControlError("the connection is gone")
        send(peer, message)

    prefill.channel.send = cut
    name, grant = ask(wire)
    if lane == "pull":
        cluster.until(lambda: any(ready.final for ready in wire.of(Ready)))
        wire.send(Taken(name, grant))
    cluster.until(lambda: not prefill.peers.ready())
    settled(cluster, prefill)
    assert wire.of(Done) + wire.of(Confirmed) == []
