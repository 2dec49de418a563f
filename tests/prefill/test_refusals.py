"""What a prefill worker refuses, and what it never confirms."""

import math

import pytest
from support.decode_wire import GRANTED, ask, meet, settled

from kvxfer.control.messages import (
    Abort,
    Confirmed,
    Done,
    Failed,
    Grant,
    PrefillRequest,
    Ready,
    Taken,
)
from kvxfer.control.router_messages import Sampling

BAD_REQUESTS = [
    ({"tokens": []}, "prompt of 0 tokens"),
    ({"tokens": [1] * 253, "blocks": [list(range(1, 64))]}, "takes 1 to 252"),
    ({"tokens": [1, 97]}, "vocabulary"),
    ({"tokens": [1, -1]}, "vocabulary"),
    ({"tokens": [1, 2**63]}, "vocabulary"),
    ({"blocks": [GRANTED[0][:4]]}, "grant: [4] blocks"),
    ({"blocks": []}, "grant: [] blocks"),
    ({"blocks": [*GRANTED, *GRANTED]}, "grant: [5, 5] blocks"),
    ({"blocks": [[0, *GRANTED[0][1:]]]}, "null block"),
    ({"blocks": [[*GRANTED[0][1:], 64]]}, "beyond the capacity"),
    ({"blocks": [[*GRANTED[0][1:], -1]]}, "null block"),
    ({"blocks": [[*GRANTED[0][1:], 2**64 - 1]]}, "beyond the capacity"),
    ({"blocks": [[9, 3, 7, 5, 9]]}, "names a block twice"),
    ({"num_cached": -4}, "grant: num_cached_tokens: -4"),
    ({"num_cached": 18, "blocks": [[5]]}, "num_cached_tokens: 18 of a prompt of 18"),
    ({"num_cached": 20, "blocks": [[]]}, "num_cached_tokens: 20"),
    ({"num_cached": 2**63, "blocks": [[]]}, "num_cached_tokens"),
    ({"num_cached": 6, "blocks": [GRANTED[0][1:]]}, "6 are not blocks of 4"),
    ({"num_cached": 8}, "grant: [5] blocks for tokens [8, 18), which need [3]"),
    ({"num_cached": 8, "blocks": [GRANTED[0][:2]]}, "grant: [2] blocks"),
    ({"num_cached": 4, "blocks": None}, "num_cached_tokens: 4, and no blocks"),
    ({"timeout_s": 0.0}, "timeout"),
    ({"timeout_s": -1.0}, "timeout"),
    ({"timeout_s": math.nan}, "timeout"),
    ({"timeout_s": math.inf}, "timeout"),
    ({"sampling": Sampling(temperature=-1.0)}, "temperature"),
    ({"sampling": Sampling(top_p=math.nan)}, "top_p"),
    ({"sampling": Sampling(seed=-5)}, "seed"),
]


@pytest.mark.parametrize("changes, reason", BAD_REQUESTS)
def test_a_request_that_cannot_be_served_fails_and_costs_nothing_else(cluster, changes, reason):
    prefill, wire = meet(cluster, "push")
    name, grant = ask(wire, **changes)
    cluster.until(lambda: bool(wire.of(Failed)))
    failed = wire.of(Failed)[0]
    assert (failed.request_id, failed.grant_id) == (name, grant)
    assert reason in failed.reason
    assert prefill.peers.ready()
    ask(wire, "good")
    cluster.until(lambda: bool(wire.of(Done)))
    settled(cluster, prefill)


def test_a_grant_asked_for_twice_is_used_once(cluster):
    prefill, wire = meet(cluster, "push")
    prefill.runner.hold()
    ask(wire)
    ask(wire)
    cluster.until(lambda: prefill.role.status()["jobs"] == 1)
    prefill.runner.release()
    cluster.until(lambda: bool(wire.of(Done)))
    ask(wire)
    cluster.until(lambda: len(wire.of(Done)) == 2)
    assert wire.of(Done)[0] == wire.of(Done)[1]
    assert prefill.runner.num_chunks == 3
    settled(cluster, prefill)


def test_a_stranger_gets_nothing(cluster):
    prefill, wire = meet(cluster, "push")
    stranger = cluster.wire("decode", worker_id="stranger")
    stranger.dial(prefill)
    request = PrefillRequest("x", [1], Sampling(), Grant("g", [1], 9, 0), False)
    cluster.until(lambda: stranger.says(request))
    cluster.turn_for(0.05)
    assert prefill.runner.num_chunks == 0
    ask(wire)
    cluster.until(lambda: bool(wire.of(Done)))
    settled(cluster, prefill)


def test_a_lease_that_was_given_up_is_never_confirmed(cluster):
    prefill, wire = meet(cluster, "pull")
    name, grant = ask(wire, timeout_s=0.3)
    cluster.until(lambda: any(ready.final for ready in wire.of(Ready)))
    cluster.until(lambda: bool(wire.of(Failed)))
    assert "deadline passed in state HANDING_OVER" in wire.of(Failed)[0].reason
    settled(cluster, prefill)
    wire.send(Taken(name, grant))
    cluster.until(lambda: len(wire.of(Failed)) == 2)
    assert wire.of(Failed)[1] == wire.of(Failed)[0], "the first word stands"
    assert wire.of(Confirmed) == []


@pytest.mark.parametrize("when", ["computing", "another lease"])
def test_taken_too_early_or_under_another_lease_is_never_confirmed(cluster, when):
    prefill, wire = meet(cluster, "pull")
    prefill.runner.hold()
    name, grant = ask(wire)
    cluster.until(lambda: prefill.role.status()["jobs"] == 1)
    if when == "another lease":
        prefill.runner.release()
        cluster.until(lambda: any(ready.final for ready in wire.of(Ready)))
    wire.send(Taken(name, grant if when == "computing" else "other"))
    cluster.turn_for(0.05)
    prefill.runner.release()
    cluster.until(lambda: bool(wire.of(Failed)))
    wire.send(Abort(name, grant, "enough"))
    settled(cluster, prefill)
    assert wire.of(Confirmed) == []


def test_taken_where_we_push_does_not_free_what_is_being_written(cluster):
    prefill, wire = meet(cluster, "push")
    prefill.connector.moving.clear()
    name, grant = ask(wire)
    cluster.until(lambda: prefill.connector.num_submitted == 3)
    wire.send(Taken(name, grant))
    cluster.turn_for(0.05)
    assert wire.of(Done) == wire.of(Confirmed) == []
    assert prefill.pools.counts().used == 5, "writes are still in flight"
    prefill.connector.moving.set()
    settled(cluster, prefill)
    assert wire.of(Done) == []
