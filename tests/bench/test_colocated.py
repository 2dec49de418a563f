"""The single process that P/D is compared with: the null model's tokens follow from the KV that it
reads, so that a block used by two, or too early, would show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.cluster import Cluster
from support.workers import Worker

from kvxfer.bench.serving.colocated import Colocated


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def colocated(cluster: Cluster, capacity: int = 64, **options: int) -> Worker:
    return cluster.add("decode", make=Colocated, engine={"capacity": capacity}, **options)


def check_idle(cluster: Cluster, worker: Worker) -> None:
    cluster.until(lambda: not worker.role.is_busy)
    worker.check_conserved()


def test_prompts_are_computed_in_chunks_between_steps_of_one_batch(cluster: Cluster) -> None:
    worker = colocated(cluster)
    cluster.connect_router(worker)
    worker.runner.hold()
    sent = [cluster.send(worker, num_tokens=20, max_new_tokens=9) for _ in range(4)]
    sent.append(cluster.send(worker, num_tokens=3, max_new_tokens=1))
    cluster.until(lambda: len(worker.role._waiting) == 4)
    worker.runner.release()
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    assert worker.runner.num_chunks == 4 * 3 + 1  # of 8 tokens
    assert max(worker.runner.batch_sizes) >= 3
    assert sum(worker.runner.batch_sizes) == 4 * 8
    check_idle(cluster, worker)


def test_no_more_run_than_may(cluster: Cluster) -> None:
    worker = colocated(cluster, max_num_seqs=2)
    sent = [cluster.send(worker, max_new_tokens=6) for _ in range(5)]
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    assert max(worker.runner.batch_sizes) == 2
    check_idle(cluster, worker)


def test_prompts_wait_for_blocks(cluster: Cluster) -> None:
    worker = colocated(cluster, capacity=16)
    sent = [cluster.send(worker, num_tokens=24, max_new_tokens=5) for _ in range(4)]  # 8 of 15 each
    cluster.finish(*sent)
    for one in sent:
        one.check_equal()
    check_idle(cluster, worker)


def test_one_that_waits_too_long_ends_with_an_error(cluster: Cluster) -> None:
    worker = colocated(cluster, max_num_seqs=1, request_timeout_s=0.05)
    cluster.connect_router(worker)
    worker.runner.hold()
    first, late = (cluster.send(worker, max_new_tokens=30) for _ in range(2))
    cluster.turn_for(0.1)
    worker.runner.release()
    cluster.finish(first, late)
    first.check_equal()
    assert late.finished is not None and late.finished.reason == "error"
    assert "deadline" in late.finished.error
    check_idle(cluster, worker)


def test_a_cancel_ends_one_and_spares_the_others(cluster: Cluster) -> None:
    worker = colocated(cluster)
    router = cluster.connect_router(worker)
    worker.runner.hold()
    first, second, third = (cluster.send(worker, max_new_tokens=50) for _ in range(3))
    cluster.until(lambda: len(worker.role._waiting) == 2)
    for one in (first, third):  # one that is being computed, one that waits
        router.cancel(one.completion)
    cluster.turn_for(0.05)
    worker.runner.release()
    cluster.finish(second)
    second.check_equal()
    check_idle(cluster, worker)


def test_a_step_that_fails_ends_those_that_had_begun(cluster: Cluster) -> None:
    worker = colocated(cluster)
    cluster.connect_router(worker)
    worker.runner.fail_next = "worn out"
    failed = cluster.send(worker)
    cluster.finish(failed)
    assert failed.finished is not None and failed.finished.reason == "error"
    assert "worn out" in failed.finished.error
    good = cluster.send(worker)
    cluster.finish(good)
    good.check_equal()
    check_idle(cluster, worker)


def test_what_can_never_be_is_refused(cluster: Cluster) -> None:
    worker = colocated(cluster)
    refused = cluster.send(worker, num_tokens=10, max_new_tokens=5000)
    cluster.finish(refused)
    assert refused.finished is not None and refused.finished.reason == "refused"
    check_idle(cluster, worker)
