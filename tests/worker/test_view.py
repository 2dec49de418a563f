"""What a worker shows of itself."""

import time

import numpy as np
import pytest
from support.workers import GRANULARITY

from kvxfer.cache.block_states import BlockState
from kvxfer.control.view_messages import (
    MAX_RANGES,
    MAX_REQUESTS,
    MAX_RUNS,
    MAX_STATES,
    MAX_TRANSFERS,
)
from kvxfer.control.wire import encode
from kvxfer.worker.trails import Trail
from kvxfer.worker.view import joined_ranges

ASKED_NS = 7


def view_of(worker):
    return worker.role._view.make(ASKED_NS)


def in_state(view, state):
    return view.groups[0].counts[state]


def test_a_view_is_of_the_memory_and_the_blocks_that_there_are(cluster):
    worker = cluster.add("decode", engine={"capacity": 64, "bound": 32})
    view, geometry = view_of(worker), worker.cache.geometry
    assert (view.worker_id, view.role, view.asked_ns) == ("decode-0", "decode", ASKED_NS)
    assert view.now_ns <= time.monotonic_ns()
    assert view.reserved_bytes == geometry.total_bytes
    assert view.committed == [(r.offset, r.size) for r in worker.cache.buffer.committed]
    assert view.registered == view.committed
    assert sum(size for _, size in view.committed) == view.committed_bytes
    (group,) = view.groups
    assert (group.capacity, group.usable) == (64, worker.pools.num_blocks[0])
    assert group.cells == [(BlockState.NULL, 1), (BlockState.FREE, group.usable - 1)]
    assert group.num_segments * group.segment_bytes == geometry.groups[0].total_bytes


def test_granted_blocks_are_in_flight_until_they_are_filled(cluster):
    prefill, decode = cluster.pair("pull")
    prefill.runner.hold()
    sent = cluster.send(decode, num_tokens=10, max_new_tokens=20)
    cluster.until(lambda: decode.role._in_flight())
    view = view_of(decode)
    assert (in_state(view, BlockState.IN_FLIGHT), view.num_requests) == (3, 1)
    held = decode.pools.counts().used
    assert in_state(view, BlockState.USED) == held - 3, "room for tokens to come"
    prefill.runner.release()
    cluster.finish(sent)
    cluster.until_idle()
    view = view_of(decode)
    assert (in_state(view, BlockState.IN_FLIGHT), in_state(view, BlockState.USED)) == (0, 0)


@pytest.mark.parametrize("lane", ["push", "pull"])
def test_trails_and_transfers_tell_a_request_from_both_ends(cluster, lane):
    prefill, decode = cluster.pair(lane)
    sent = cluster.send(decode, num_tokens=10)
    cluster.finish(sent)
    cluster.until_idle()
    ours, theirs = view_of(decode), view_of(prefill)
    for view, peer, last in [(ours, "prefill-0", "running"), (theirs, "decode-0", "ended")]:
        (trail,) = view.requests
        names = [name for name, _ in trail.states]
        times = [at for _, at in trail.states]
        assert (trail.request_id, trail.peer) == (sent.completion.request_id, peer)
        assert last in names and times == sorted(times) and times[-1] <= view.now_ns
    mover = theirs if lane == "push" else ours
    other = ours if lane == "push" else theirs
    assert other.transfers == [] and mover.num_transfers == len(mover.transfers) > 0
    assert all(one.start_ns <= one.end_ns and not one.error for one in mover.transfers)
    assert mover.transferred_bytes == sum(one.num_bytes for one in mover.transfers) > 0
    (lane_view,) = ours.lanes
    assert (lane_view.peer, lane_view.lane) == ("prefill-0", f"loopback/{lane}")


def test_a_transfer_under_way_has_no_end(cluster):
    _, decode = cluster.pair("pull")
    decode.connector.moving.clear()
    sent = cluster.send(decode)
    cluster.until(lambda: view_of(decode).transfers)
    one = view_of(decode).transfers[0]
    assert (one.end_ns, one.num_bytes, one.peer) == (0, 0, "prefill-0")
    decode.connector.moving.set()
    cluster.finish(sent)
    cluster.until_idle()


def test_a_view_is_bounded_whatever_there_is(cluster):
    _, decode = cluster.pair("pull", engine={"capacity": 20_000, "bound": 20_000})
    decode.pools.grow([20_000])
    blocks = decode.pools.allocate([19_999])[0]
    decode.pools.free([blocks[::2]])
    trails, log = decode.role._view.trails, decode.transfer.log
    for _ in range(3 * MAX_REQUESTS):
        trails.add("r" * 1000, "", Owner())
        log.began("nobody", decode.peers.ready()[0].lane)
    begun = time.perf_counter()
    view = view_of(decode)
    took_s = time.perf_counter() - begun
    assert len(view.groups[0].cells) <= MAX_RUNS and view.groups[0].blocks_per_cell > 1
    assert len(view.requests) == MAX_REQUESTS and len(view.transfers) <= MAX_TRANSFERS
    assert len(encode(view)) < 64 << 10
    assert took_s < 0.25, "no loop over blocks: a few milliseconds, on a busy machine more"
    decode.pools.free([blocks[1::2]])


class Owner:
    """What has a trail."""


def test_a_trail_is_bounded_and_keeps_how_it_stands():
    trail = Trail()
    for number in range(MAX_STATES + 5):
        trail.enter(f"s{number}")
        trail.enter(f"s{number}")
    assert len(trail.states) == MAX_STATES
    assert trail.states[0][0] == "s0" and trail.states[-1][0] == f"s{MAX_STATES + 4}"


def test_ranges_that_adjoin_are_one_and_too_many_lose_the_narrowest_gaps():
    assert joined_ranges([], [], 5) == []
    assert joined_ranges([0, 10, 30], [10, 5, 1], 5) == [(0, 15), (30, 1)]
    assert joined_ranges([0, 11, 30, 100], [10, 5, 1, 1], 2) == [(0, 31), (100, 1)]
    assert joined_ranges([0, 11, 30, 100], [10, 5, 1, 1], 1) == [(0, 101)]
    offsets = np.arange(0, 4000 * GRANULARITY, 2 * GRANULARITY)
    found = joined_ranges(offsets, np.full(len(offsets), GRANULARITY), MAX_RANGES)
    assert len(found) == MAX_RANGES and found[0][0] == 0
