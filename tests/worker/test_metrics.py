"""What a worker tells of itself, asked by message, over a hand-over."""

import pytest
from support.exposition import read, value

from kvxfer.control.telemetry_messages import Metrics, MetricsQuery
from kvxfer.telemetry.families import WORKER
from kvxfer.worker.metrics import REASONS


def text_of(worker):
    return worker.parts.metrics.gather(worker.parts).text()


@pytest.mark.parametrize("lane", ["push", "pull"])
def test_a_hand_over_is_counted_by_who_moved_it(cluster, lane):
    prefill, decode = cluster.pair(lane)
    sent = cluster.send(decode, num_tokens=10, max_new_tokens=3)
    cluster.finish(sent)
    sent.check_equal()
    cluster.until_idle()
    movers = {"push": (prefill, decode), "pull": (decode, prefill)}[lane]
    moved, other = map(text_of, movers)
    labels = {"connector": "loopback", "direction": lane}
    stats = sent.finished.transfer
    assert stats.num_bytes > 0
    assert value(moved, "kvxfer_transfer_bytes_total", **labels) == stats.num_bytes
    assert value(moved, "kvxfer_transfer_descriptors_total", **labels) == stats.num_runs
    assert value(moved, "kvxfer_transfer_seconds_count", **labels) == stats.num_tickets
    assert value(moved, "kvxfer_transfer_seconds_sum", **labels) == pytest.approx(
        stats.busy_ns / 1e9
    )
    assert value(moved, "kvxfer_transfer_failures_total", **labels) == 0
    assert "kvxfer_transfer_bytes_total" not in read(other)


def test_the_cache_and_requests_are_as_they_are(cluster):
    prefill, decode = cluster.pair(engine={"capacity": 64})
    prompt = list(range(12))
    first, second = (cluster.send(decode, tokens=prompt) for _ in range(2))
    cluster.finish(first, second)
    cluster.until_idle()
    cancelled = cluster.send(decode, max_new_tokens=50)
    cluster.until(lambda: len(cancelled.completion.output) > 1)
    running = text_of(decode)
    assert value(running, "kvxfer_num_requests_running") == 1
    used = decode.pools.counts().used
    assert value(running, "kvxfer_blocks", state="used") == used > 0
    cluster.router.cancel(cancelled.completion)
    cluster.finish(cancelled)
    cluster.until_idle()
    text = {worker: text_of(worker) for worker in (prefill, decode)}
    for worker in (prefill, decode):
        counts = worker.pools.counts()
        for state in ("free", "used", "quarantined", "cached"):
            told = value(text[worker], "kvxfer_blocks", state=state)
            assert told == getattr(counts, state)
        committed = worker.cache.committed_bytes
        assert value(text[worker], "kvxfer_cache_committed_bytes") == committed
        assert value(text[worker], "kvxfer_cache_registered_bytes") == committed
        assert value(text[worker], "kvxfer_cache_reserved_bytes") == worker.cache.reserved_bytes
        assert value(text[worker], "kvxfer_growth_seconds_count") == 1
        assert value(text[worker], "kvxfer_num_requests_running") == 0
        assert value(text[worker], "kvxfer_num_requests_waiting") == 0
        assert value(text[worker], "kvxfer_peers") == 1
    ended = {r: value(text[decode], "kvxfer_requests_total", reason=r) for r in REASONS}
    assert ended == {**dict.fromkeys(REASONS, 0), "length": 2, "cancelled": 1}
    assert value(text[prefill], "kvxfer_requests_total", reason="done") == 3
    assert value(text[prefill], "kvxfer_prefix_cache_queries_total") == 34
    assert value(text[prefill], "kvxfer_prefix_cache_hits_total") == 8


def test_every_family_is_told_by_some_worker(cluster):
    prefill, decode = cluster.pair(lane_test=True)
    cluster.finish(cluster.send(decode))
    cluster.until_idle()
    found = {**read(text_of(prefill)), **read(text_of(decode))}
    assert set(found) == {family.name for family in WORKER}
    (series,) = found["kvxfer_lane_bytes_per_second"]
    assert dict(series[1]) == {"peer": "prefill-0", "lane": "loopback/push"}


def test_whoever_asks_is_answered_and_what_is_turned_away_is_counted(cluster):
    decode = cluster.add("decode")
    router = cluster.connect_router(decode)
    (backend,) = router._backends.values()
    answers = []
    receive = router._receive
    router._receive = lambda letter: (answers.append(letter.message), receive(letter))
    router._channel.send(backend.key, Metrics("not for a worker"))
    router._channel.send(backend.key, MetricsQuery())
    cluster.until(lambda: any(isinstance(one, Metrics) for one in answers))
    (told,) = [one for one in answers if isinstance(one, Metrics)]
    assert value(told.text, "kvxfer_misplaced_messages_total") == 1
    assert value(told.text, "kvxfer_malformed_messages_total") == 0


def test_a_failed_transfer_is_counted_as_nothing_else(cluster):
    _, decode = cluster.pair("pull")
    decode.connector.refuse.add("submit")
    sent = cluster.send(decode, num_tokens=4)  # one piece
    cluster.finish(sent)
    assert "submit is refused" in sent.finished.error
    labels = {"connector": "loopback", "direction": "pull"}
    assert value(text_of(decode), "kvxfer_transfer_failures_total", **labels) == 1
    assert value(text_of(decode), "kvxfer_transfer_bytes_total", **labels) == 0


def test_a_growth_that_fails_is_counted(cluster):
    decode = cluster.add("decode", kv_commit="elastic", kv_initial_blocks=8)
    assert value(text_of(decode), "kvxfer_growth_failures_total") == 0
    decode.engine.driver.fail_after = 0
    decode.parts.growth.request([64])
    cluster.until(lambda: bool(decode.parts.growth.problem))
    assert value(text_of(decode), "kvxfer_growth_failures_total") == 1
    assert value(text_of(decode), "kvxfer_growth_seconds_count") == 1
