"""An elastic cache between its watermarks: growth before a request has to wait, memory given back
when it was free for a while."""

import pytest

from kvxfer.errors import UsageError
from kvxfer.worker import watermarks

ELASTIC = {"kv_commit": "elastic", "kv_initial_blocks": 16, "engine": {"capacity": 128}}


def test_it_grows_ahead_of_need(cluster):
    worker = cluster.add("decode", idle=True, **ELASTIC, kv_low_watermark=0.25)
    held = worker.pools.allocate([11])
    cluster.turn_for(0.1)
    assert worker.pools.num_blocks == [16], "4 of 16 are free: not below a quarter"
    held += worker.pools.allocate([1])
    cluster.until(lambda: worker.pools.num_blocks[0] > 16)
    assert worker.pools.num_blocks[0] >= 24
    worker.pools.free([[*held[0], *held[1]]])
    cluster.until_idle()


def test_there_is_no_growth_ahead_beyond_the_budget_or_where_all_is_committed(cluster):
    full = cluster.add("decode", idle=True, **{**ELASTIC, "kv_commit": "all"}, kv_low_watermark=0.5)
    held = full.pools.allocate([120])
    cluster.turn_for(0.1)
    assert full.parts.growth.regions.generation == 1
    full.pools.free(held)
    cluster.until_idle()


def test_what_was_free_for_long_is_given_back(cluster, monkeypatch):
    monkeypatch.setattr(watermarks, "TRIM_AFTER_S", 0.2)
    worker = cluster.add("decode", idle=True, **ELASTIC, kv_low_watermark=0, kv_high_watermark=0.5)
    for wanted in (32, 64, 128):
        worker.parts.growth.request([wanted])
        cluster.until(lambda n=wanted: worker.pools.num_blocks[0] >= n)
    committed = worker.cache.committed_bytes
    held = worker.pools.allocate([64])
    cluster.turn_for(0.4)
    assert worker.cache.committed_bytes == committed, "half is in use"
    worker.pools.free([held[0][20:]])
    cluster.until(lambda: worker.cache.committed_bytes < committed)
    assert 20 < worker.pools.num_blocks[0] < 64, "what is in use stays"
    worker.pools.free([held[0][:20]])
    cluster.until(lambda: worker.pools.num_blocks[0] < 20)
    cluster.turn_for(0.5)
    assert worker.pools.num_blocks[0] >= 16, "never below what it began with"
    cluster.until_idle()


@pytest.mark.parametrize(
    "marks, field",
    [
        ({"kv_low_watermark": -0.1}, "kv_low_watermark"),
        ({"kv_high_watermark": 1.1}, "kv_high_watermark"),
        ({"kv_low_watermark": float("nan")}, "kv_low_watermark"),
        ({"kv_low_watermark": 0.5, "kv_high_watermark": 0.5}, "kv_low_watermark"),
    ],
)
def test_marks_that_cannot_be_are_refused(cluster, marks, field):
    with pytest.raises(UsageError) as refused:
        cluster.add("decode", idle=True, **ELASTIC, **marks)
    assert refused.value.field == field
