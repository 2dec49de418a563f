"""One job after another in a thread, reported to the control thread."""

import gc
import threading
import time
import weakref

import pytest
from support.running import wait_until

from kvxfer.errors import ModelError, WorkerDied
from kvxfer.worker.mailbox import Mailbox
from kvxfer.worker.work_thread import WorkThread


@pytest.fixture
def reports():
    box = Mailbox()
    yield box
    box.close()


@pytest.fixture
def thread(reports):
    made = WorkThread("worker-under-test", reports)
    made.start()
    yield made
    assert made.stop(5.0)


def run_reports(reports, until):
    deadline = time.monotonic() + 10
    while not until():
        assert time.monotonic() < deadline
        for report in reports.drain():
            report()
        time.sleep(0.001)


def never(error):
    raise AssertionError(f"failed with {error}")


def fail(text):
    raise ModelError(text)


def test_results_come_in_order_to_the_thread_that_drains(thread, reports):
    seen, where = [], []
    for number in range(50):
        thread.submit(lambda n=number: (n * n, threading.current_thread().name), seen.append, never)
    thread.submit(threading.current_thread, where.append, never)
    run_reports(reports, lambda: bool(where))
    assert seen == [(n * n, "worker-under-test") for n in range(50)]
    assert where[0] is not threading.current_thread()


def test_nothing_is_reported_before_somebody_drains(thread, reports):
    seen = []
    thread.submit(lambda: 1, seen.append, never)
    time.sleep(0.05)
    assert seen == []
    run_reports(reports, lambda: seen == [1])


def test_a_failure_of_ours_is_the_jobs_own_and_the_next_job_runs(thread, reports):
    failures, seen = [], []
    thread.submit(lambda: fail("first"), seen.append, failures.append)
    thread.submit(lambda: fail("second"), seen.append, failures.append)
    thread.submit(lambda: "fine", seen.append, failures.append)
    run_reports(reports, lambda: bool(seen))
    assert [str(error) for error in failures] == ["first", "second"]
    assert seen == ["fine"]


def test_a_failed_job_keeps_nothing_alive(thread, reports):
    class Held:
        pass

    held, failures = Held(), []
    gone = weakref.ref(held)

    def job(held=held):
        fail("with it")

    thread.submit(job, failures.append, lambda error: failures.append(str(error)))
    run_reports(reports, lambda: bool(failures))
    thread.submit(lambda: None, failures.append, never)
    run_reports(reports, lambda: len(failures) == 2)
    gc.disable()
    try:
        del held, job
        assert gone() is None
    finally:
        gc.enable()


def test_anything_else_ends_in_worker_died_with_a_clear_text(reports):
    thread = WorkThread("model", reports)
    thread.start()
    thread.submit(lambda: {}["missing"], never, never)
    with pytest.raises(WorkerDied, match=r"^thread model died: KeyError: 'missing'$"):
        run_reports(reports, lambda: False)
    assert thread.stop(5.0)


def test_stop_lets_the_jobs_before_it_end(reports):
    thread = WorkThread("model", reports)
    thread.start()
    seen = []
    for number in range(5):
        thread.submit(lambda n=number: time.sleep(0.01) or n, seen.append, never)
    assert thread.stop(5.0)
    for report in reports.drain():
        report()
    assert seen == list(range(5))


def test_stop_gives_up_on_a_stuck_job_at_its_deadline(reports):
    thread, stuck = WorkThread("model", reports), threading.Event()
    thread.start()
    thread.submit(lambda: stuck.wait(20.0), lambda result: None, never)
    started = time.monotonic()
    assert thread.stop(0.1) is False
    assert time.monotonic() - started < 5.0
    stuck.set()
    assert thread.stop(5.0) is True


def test_stop_before_start_and_twice(reports):
    assert WorkThread("model", reports).stop(1.0) is True
    thread = WorkThread("model", reports)
    thread.start()
    assert thread.stop(5.0) is True
    assert thread.stop(5.0) is True


def test_what_must_run_first_runs_in_the_thread(reports):
    order = []
    thread = WorkThread("model", reports, lambda: order.append(threading.current_thread().name))
    thread.submit(lambda: order.append("job"), lambda result: None, never)
    thread.start()
    assert thread.stop(5.0)
    assert order == ["model", "job"]


class Idler(WorkThread):
    def __init__(self, reports):
        super().__init__("idler", reports)
        self.num_idle = 0

    def idle(self):
        self.num_idle += 1
        if self.num_idle == 3:
            raise OSError("broken pipe dream")
        return 0.001


def test_idle_is_called_between_jobs_and_its_errors_are_told(reports):
    thread = Idler(reports)
    thread.start()
    with pytest.raises(WorkerDied, match="thread idler died: OSError: broken pipe dream"):
        run_reports(reports, lambda: False)
    assert thread.num_idle == 3
    assert thread.stop(5.0)


def in_steps(count, seen, end="done"):
    try:
        for number in range(count):
            seen.append(number)
            yield
        return end
    finally:
        seen.append("left")


def test_jobs_have_their_turns_between_the_steps_of_a_long_one(thread, reports):
    seen, done = [], []

    def steps():
        for number in range(100):
            seen.append(number)
            if number == 1:  # comes while the long one is under way
                thread.submit(lambda: seen.append("job"), lambda _: None, never)
            yield
        return "done"

    thread.submit_steps(steps, done.append, never)
    run_reports(reports, lambda: bool(done))
    assert done == ["done"]
    assert [one for one in seen if one != "job"] == list(range(100))
    assert 1 < seen.index("job") < 10


def test_long_ones_run_one_after_the_other_and_fail_alone(thread, reports):
    seen, ended = [], []

    def failing():
        yield
        fail("no")

    for steps in (lambda: in_steps(3, seen, "first"), failing, lambda: in_steps(2, seen, "last")):
        thread.submit_steps(steps, ended.append, lambda error: ended.append(str(error)))
    run_reports(reports, lambda: len(ended) == 3)
    assert ended == ["first", "no", "last"]
    assert seen == [0, 1, 2, "left", 0, 1, "left"]


def test_what_is_not_at_its_end_is_given_up_when_the_thread_stops(reports):
    thread, seen, failed = WorkThread("worker-under-test", reports), [], []
    thread.submit_steps(lambda: in_steps(10**9, seen), never, failed.append)
    thread.submit_steps(lambda: in_steps(1, []), never, failed.append)
    thread.start()
    wait_until(lambda: len(seen) > 5, 10, "it is under way")
    assert thread.stop(5.0)
    run_reports(reports, lambda: len(failed) == 2)
    assert seen[-1] == "left"
    assert "the worker ends" in str(failed[0])


def test_a_bug_in_a_step_ends_in_worker_died(reports):
    thread = WorkThread("model", reports)

    def steps():
        yield
        raise ZeroDivisionError("nought")

    thread.submit_steps(steps, never, never)
    thread.start()
    with pytest.raises(WorkerDied, match="thread model died: ZeroDivisionError: nought"):
        run_reports(reports, lambda: False)
