"""Transfers that stand still cost their peer its session, and no other."""

import pytest

from kvxfer.worker.progress import Progress


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_peer_stalls_when_none_of_its_transfers_ends():
    clock = Clock()
    progress = Progress(clock)
    first = progress.began("a")
    clock.now += 6
    second = progress.began("a")
    other = progress.began("b")
    clock.now += 5
    assert progress.stalled(10) == ["a"], "a new one is no progress"
    progress.ended("a", first)
    assert progress.stalled(10) == []
    clock.now += 11
    assert progress.stalled(10) == ["a", "b"]
    progress.ended("a", second)
    progress.ended("b", other)
    clock.now += 100
    assert progress.stalled(10) == []


def test_what_a_lost_peer_left_is_not_held_against_it():
    clock = Clock()
    progress = Progress(clock)
    old = progress.began("a")
    progress.forget("a")
    clock.now += 100
    assert progress.stalled(10) == []
    new = progress.began("a")
    clock.now += 5
    progress.ended("a", old)
    clock.now += 6
    assert progress.stalled(10) == ["a"], "an old one that ends is no progress"
    progress.ended("a", new)
    assert progress.stalled(0) == []


@pytest.mark.parametrize("lane", ["push", "pull"])
def test_a_stalled_transfer_is_fenced_and_its_blocks_wait_for_it(cluster, lane):
    prefill, decode = cluster.pair(lane, transfer_timeout_s=0.4)
    mover = prefill if lane == "push" else decode
    mover.connector.moving.clear()
    sent = cluster.send(decode, num_tokens=17)
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    why = "no transfer made progress for 0.4 s" if lane == "pull" else "does not know us any more"
    assert why in sent.finished.error
    assert decode.pools.counts().quarantined > 0
    mover.connector.moving.set()
    cluster.until(lambda: bool(prefill.peers.ready() and decode.peers.ready()))
    cluster.until_idle()
    again = cluster.send(decode)
    cluster.finish(again)
    again.check_equal()
