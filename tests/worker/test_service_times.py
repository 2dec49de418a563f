"""The estimate of 'try later'."""

import pytest

from kvxfer.worker.service_times import FIRST_GUESS_S, ServiceTimes


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_the_estimate_follows_how_quickly_the_queue_moves():
    clock = Clock()
    times = ServiceTimes(clock)
    assert times.wait_s(4) == pytest.approx(4 * FIRST_GUESS_S)
    for pace in (0.5, 0.02):
        for _ in range(60):
            times.left(9)
            clock.now += pace
        assert times.wait_s(10) == pytest.approx(10 * pace, rel=0.1)
    assert times.wait_s(0) == 0


def test_a_pause_without_a_queue_is_no_service_time():
    clock = Clock()
    times = ServiceTimes(clock)
    times.left(1)
    clock.now += 0.1
    times.left(0)
    clock.now += 1000.0
    times.left(1)
    assert times.wait_s(1) == pytest.approx(0.1)


def test_a_queue_that_stands_still_is_told_as_that_slow():
    clock = Clock()
    times = ServiceTimes(clock)
    for _ in range(5):
        times.left(3)
        clock.now += 0.01
    clock.now += 7.0
    assert times.wait_s(3) >= 21.0
