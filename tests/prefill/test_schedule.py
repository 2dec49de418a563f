"""Prefill jobs: in order of arrival, in chunks, with blocks only when they can start."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cache.footprint import blocks_needed
from kvxfer.cache.pools import BlockPools
from kvxfer.cache.prefix_cache import PrefixCache
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.control.messages import Grant, PrefillRequest
from kvxfer.control.router_messages import Sampling
from kvxfer.control.session import Peer
from prefill.schedule import JobState, PrefillJob, PrefillScheduler

BLOCK = 4
CHUNK = 8


def make_job(num_tokens, name="r"):
    request = PrefillRequest(
        name, list(range(num_tokens)), Sampling(seed=3), Grant(f"grant-{name}", [], 9.0, 0), False
    )
    return PrefillJob(request, Peer("peer", 0.0), deadline_s=0.0)


FULL = KVCacheSpec(1, 1, 8, 8, "float32", BLOCK)
SLIDING = KVCacheSpec(1, 1, 8, 8, "float32", BLOCK, GroupKind.SLIDING, 6)
CROSS = KVCacheSpec(1, 1, 8, 8, "float32", BLOCK, GroupKind.CROSS)


def make_scheduler(num_blocks=16, specs=(FULL,), chunk=CHUNK):
    pools = BlockPools(len(specs))
    pools.grow([num_blocks] * len(specs))
    return PrefillScheduler(pools, chunk, specs, PrefixCache(pools, specs)), pools


def finish(scheduler, job, step, token=None):
    return scheduler.finish_chunk(job, step, token)


def test_a_job_walks_through_its_states():
    scheduler, pools = make_scheduler()
    job = make_job(19)
    scheduler.add(job)
    assert (job.state, job.blocks, len(scheduler)) == (JobState.WAITING, [], 1)
    seen = []
    for last in (False, False, True):
        found, step = scheduler.next_chunk()
        assert found is job
        job.chunk_running = True
        assert scheduler.next_chunk() is None, "one chunk at a time"
        assert (step.sample is not None) == last
        assert step.tables == [BlockTable(job.blocks[0])]
        added = finish(scheduler, job, step, 42 if last else None)
        seen += list(step.tokens)
        assert added == range(step.start, step.start + len(step.tokens))
        assert job.state is (JobState.HANDING_OVER if last else JobState.COMPUTING)
    assert seen == list(range(19))
    assert (job.computed, job.first_token, len(job.blocks[0])) == (19, 42, 5)
    assert scheduler.current is None
    assert pools.counts().used == 5, "freed by the worker, once the other side has it"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 60), st.integers(1, 5))
def test_chunks_cover_each_token_once(num_tokens, chunk_blocks):
    scheduler, _ = make_scheduler(40, chunk=chunk_blocks * BLOCK)
    job = make_job(num_tokens)
    scheduler.add(job)
    covered = []
    while (found := scheduler.next_chunk()) is not None:
        _, step = found
        assert step.start % BLOCK == 0
        assert len(step.tokens) <= chunk_blocks * BLOCK
        covered += finish(scheduler, job, step, 1)
    assert covered == list(range(num_tokens))
    assert job.state is JobState.HANDING_OVER


def test_jobs_start_in_order_and_a_large_one_is_not_overtaken():
    scheduler, pools = make_scheduler(num_blocks=6)
    held = pools.allocate([2])
    large, small = make_job(13, "large"), make_job(2, "small")
    scheduler.add(large)
    scheduler.add(small)
    assert scheduler.wanted_blocks() == [4]
    assert scheduler.next_chunk() is None
    assert (large.blocks, small.blocks) == ([], [])
    pools.free(held)
    assert scheduler.wanted_blocks() == []
    assert scheduler.next_chunk()[0] is large


def test_nothing_is_missing_while_a_job_computes_or_none_waits():
    scheduler, _ = make_scheduler(num_blocks=3)
    assert scheduler.wanted_blocks() == []
    scheduler.add(make_job(8, "first"))
    scheduler.next_chunk()
    scheduler.add(make_job(8, "second"))
    assert scheduler.wanted_blocks() == []


def test_a_group_with_a_window_gets_what_it_needs_at_once_and_no_more():
    scheduler, pools = make_scheduler(40, (FULL, SLIDING))
    job = make_job(60)
    scheduler.add(job)
    scheduler.next_chunk()
    assert [len(ids) for ids in job.blocks] == blocks_needed((FULL, SLIDING), 60, 0, CHUNK)
    assert [len(ids) for ids in job.blocks] == [15, 4]
    assert pools.counts().used == 19


def test_an_encoder_sees_the_whole_prompt_at_once():
    scheduler, _ = make_scheduler(40, (FULL, CROSS))
    job = make_job(60)
    scheduler.add(job)
    _, step = scheduler.next_chunk()
    assert (len(step.tokens), step.sample is not None) == (60, True)
    assert [len(ids) for ids in job.blocks] == [1, 15]


def test_a_removed_job_is_computed_no_further():
    scheduler, _ = make_scheduler()
    first, second = make_job(16, "first"), make_job(4, "second")
    scheduler.add(first)
    scheduler.add(second)
    _, step = scheduler.next_chunk()
    first.chunk_running = True
    first.state = JobState.ENDING
    scheduler.remove(first)
    assert scheduler.next_chunk()[0] is second
    finish(scheduler, first, step)
    assert (first.state, first.chunk_running) == (JobState.ENDING, False)
    assert scheduler.current is second, "the end of a removed job's chunk changes nothing else"
    scheduler.remove(second)
    assert scheduler.next_chunk() is None
    assert len(scheduler) == 0


def test_a_given_up_job_does_not_come_back_with_its_last_chunk():
    scheduler, _ = make_scheduler()
    job = make_job(4)
    scheduler.add(job)
    _, step = scheduler.next_chunk()
    job.state = JobState.ENDING
    scheduler.remove(job)
    finish(scheduler, job, step, 5)
    assert job.state is JobState.ENDING


def test_requests_of_one_name_are_told_apart_by_grant_and_peer():
    one, other = make_job(4, "a"), make_job(4, "b")
    assert one.key != other.key
    assert one.key == (one.peer.key, "grant-a")


@pytest.mark.parametrize(
    "running, moves, quiet", [(False, 0, True), (True, 0, False), (False, 1, False)]
)
def test_quiet_means_neither_model_nor_connector_works_for_it(running, moves, quiet):
    job = make_job(4)
    job.chunk_running, job.moves_in_flight = running, moves
    assert job.is_quiet is quiet


def test_the_sampling_travels_with_the_last_chunk():
    scheduler, _ = make_scheduler()
    scheduler.add(make_job(8))
    _, step = scheduler.next_chunk()
    assert (step.sample.temperature, step.sample.top_p, step.sample.seed) == (0.0, 1.0, 3)
