"""Prefill jobs: in order of arrival, in chunks, with blocks only when they can start."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cache.blocks import BlockAllocator
from kvxfer.control.messages import Grant, PrefillRequest, Sampling
from kvxfer.control.session import Peer
from prefill.schedule import JobState, PrefillJob, PrefillScheduler

BLOCK = 4
CHUNK = 8


def make_job(num_tokens, name="r"):
    request = PrefillRequest(
        name, list(range(num_tokens)), Sampling(seed=3), Grant(f"grant-{name}", [], 9.0)
    )
    return PrefillJob(request, Peer("peer", 0.0), deadline_s=0.0)


def make_scheduler(num_blocks=16):
    allocator = BlockAllocator(num_blocks)
    return PrefillScheduler(allocator, CHUNK, BLOCK), allocator


def finish(scheduler, job, step, token=None):
    return scheduler.finish_chunk(job, step, token)


def test_a_job_walks_through_its_states():
    scheduler, allocator = make_scheduler()
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
        assert step.block_table == job.blocks
        added = finish(scheduler, job, step, 42 if last else None)
        seen += list(step.tokens)
        assert added == range(step.start, step.start + len(step.tokens))
        assert job.state is (JobState.HANDING_OVER if last else JobState.COMPUTING)
    assert seen == list(range(19))
    assert (job.computed, job.first_token, len(job.blocks)) == (19, 42, 5)
    assert scheduler.current is None
    assert allocator.counts().used == 5, "freed by the worker, once the other side has it"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 60), st.integers(1, 5))
def test_chunks_cover_each_token_once(num_tokens, chunk_blocks):
    allocator = BlockAllocator(40)
    scheduler = PrefillScheduler(allocator, chunk_blocks * BLOCK, BLOCK)
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
    scheduler, allocator = make_scheduler(num_blocks=6)
    held = allocator.allocate(2)
    large, small = make_job(13, "large"), make_job(2, "small")
    scheduler.add(large)
    scheduler.add(small)
    assert scheduler.missing_blocks() == 1
    assert scheduler.next_chunk() is None
    assert (large.blocks, small.blocks) == ([], [])
    allocator.free(held)
    assert scheduler.missing_blocks() == 0
    assert scheduler.next_chunk()[0] is large


def test_nothing_is_missing_while_a_job_computes_or_none_waits():
    scheduler, _ = make_scheduler(num_blocks=3)
    assert scheduler.missing_blocks() == 0
    scheduler.add(make_job(8, "first"))
    scheduler.next_chunk()
    scheduler.add(make_job(8, "second"))
    assert scheduler.missing_blocks() == 0


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
