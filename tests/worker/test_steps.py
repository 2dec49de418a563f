"""A model step that runs out of memory: unused cache is given back and the step tried once more."""

import pytest

from kvxfer.errors import ModelOutOfMemory

ELASTIC = {"kv_commit": "elastic", "kv_initial_blocks": 8}
LACK = ModelOutOfMemory("the step's own allocations do not fit")


def grown_pair(cluster, lane="push", **changes):
    """Both caches have grown in steps, so that there are chunks to give back."""
    prefill, decode = cluster.pair(lane, **{**ELASTIC, **changes})
    for worker in (prefill, decode):
        for wanted in (16, 32, 64):
            worker.parts.growth.request([wanted])
            cluster.until(lambda w=worker, n=wanted: w.pools.num_blocks[0] >= n)
    return prefill, decode


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("lane", ["push", "pull"])
def test_the_step_succeeds_after_memory_was_given_back(cluster, lane, role):
    prefill, decode = grown_pair(cluster, lane)
    worker = {"prefill": prefill, "decode": decode}[role]
    committed = worker.cache.committed_bytes
    worker.runner.fail_next = LACK
    sent = cluster.send(decode, num_tokens=20)
    cluster.finish(sent)
    sent.check_equal()
    assert worker.cache.committed_bytes < committed
    assert worker.pools.num_blocks[0] < 64
    cluster.until_idle()


def test_it_is_tried_once_more_only(cluster):
    prefill, decode = grown_pair(cluster)
    failures = []

    def fail(*arguments):
        failures.append(arguments)
        raise ModelOutOfMemory("still does not fit")

    prefill.runner.prefill_chunk, works = fail, prefill.runner.prefill_chunk
    sent = cluster.send(decode, num_tokens=20)
    cluster.finish(sent)
    assert len(failures) == 2
    assert "still does not fit" in sent.finished.error
    prefill.runner.prefill_chunk = works
    cluster.until_idle()
    again = cluster.send(decode, num_tokens=20)
    cluster.finish(again)
    again.check_equal()
    cluster.until_idle()


@pytest.mark.parametrize(
    "changes, error", [({"kv_commit": "all", "kv_initial_blocks": 0}, LACK), ({}, "another reason")]
)
def test_what_is_not_elastic_or_not_memory_fails_at_once(cluster, changes, error):
    prefill, decode = grown_pair(cluster, **changes)
    committed = prefill.cache.committed_bytes
    prefill.runner.fail_next = error
    sent = cluster.send(decode, num_tokens=20)
    cluster.finish(sent)
    assert str(error) in sent.finished.error
    assert prefill.runner.num_chunks == 0
    assert prefill.cache.committed_bytes == committed
    cluster.until_idle()
