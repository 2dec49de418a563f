"""What is brought to a waiting thread is taken, in order, and wakes it, whenever it comes."""

import random
import sys
import threading
import time

import pytest

from kvxfer.worker.jobs import Jobs

LONG_S, LATE_S = 30.0, 5.0


@pytest.fixture
def often():
    """Threads change places wherever they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_nothing_comes_of_nothing():
    jobs = Jobs()
    begin = time.monotonic()
    assert jobs.take(0.0) is None
    assert jobs.take(0.05) is None
    assert time.monotonic() - begin >= 0.05


def test_what_waits_comes_in_order_and_once():
    jobs = Jobs()
    for number in range(5):
        jobs.put(number)
    assert [jobs.take(0.0) for _ in range(7)] == [0, 1, 2, 3, 4, None, None]
    jobs.put("later")
    assert jobs.take(None) == "later"


def test_what_was_taken_without_a_wait_shortens_no_later_one():
    jobs = Jobs()
    for _ in range(2):
        jobs.put("at once")
        assert jobs.take(None) == "at once"
        begin = time.monotonic()
        assert jobs.take(0.05) is None
        assert time.monotonic() - begin >= 0.05


@pytest.mark.parametrize("threads", [1, 2], ids=["one", "two"])
@pytest.mark.parametrize(
    "rounds", [2000, pytest.param(100_000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_wake_up_is_lost_however_put_and_timeout_meet(often, rounds, threads):
    """Each brings one thing, and the next one when it was taken: the one that waits has often just
    given up waiting. Should it miss a thing, it waits for much longer than who brought it, and
    where that is one thread, nobody else wakes it. Of two, none disturbs the other's order."""
    jobs, chance = Jobs(), random.Random(7)
    taken = [threading.Semaphore(0) for _ in range(threads)]
    late = []

    def bring(who):
        chance = random.Random(who)
        for number in range(rounds):
            pause_until = time.perf_counter() + chance.random() * 3e-5
            while time.perf_counter() < pause_until:
                pass
            jobs.put((who, number))
            if not taken[who].acquire(timeout=LATE_S):
                late.append((who, number))
                jobs.put(None)
                return

    def disturb():
        """Ask for Python's lock all the time, so that it is taken from whoever has it, anywhere."""
        while not is_over.is_set():
            pass

    is_over = threading.Event()
    disturber = threading.Thread(target=disturb, daemon=True)
    disturber.start()
    started = [threading.Thread(target=bring, args=[who], daemon=True) for who in range(threads)]
    for thread in started:
        thread.start()
    seen = [-1] * threads
    while seen != [rounds - 1] * threads and not late:
        found = jobs.take(chance.choice([0.0, 1e-5, 3e-5, 1e-4, LONG_S]))
        if found is not None:
            who, number = found
            assert number == seen[who] + 1
            seen[who] = number
            taken[who].release()
    is_over.set()
    for thread in (disturber, *started):
        thread.join(LATE_S)
    assert late == []
    assert jobs.take(0.0) is None
