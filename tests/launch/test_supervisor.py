"""Workers that die are started again, after longer and longer pauses; the others stay."""

from pathlib import Path

import pytest
from support.fixtures import num_open_files
from support.running import wait_until

from kvxfer.errors import WorkerDied
from kvxfer.launch.local import LocalLauncher
from kvxfer.launch.supervisor import (
    PAUSE_MAX_S,
    PAUSE_S,
    STEADY_S,
    Supervisor,
    WorkerPlan,
    WorkerState,
)

TESTS = Path(__file__).parent.parent


@pytest.fixture
def supervisor(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    files = num_open_files()
    steps = []
    with LocalLauncher(tmp_path, lambda name, text: steps.append((name, text))) as launcher:
        found = Supervisor(launcher)
        found.steps = steps
        yield found
        pids = [one.process.process.pid for one in found.workers]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert num_open_files() == files


def plan(name, *script):
    return WorkerPlan(name, "support.child_worker", (",".join(script),), f"ipc:///{name}")


def started(supervisor, *plans):
    supervisor.start(plans)
    until(supervisor, lambda: supervisor.was_ready)
    return supervisor.workers


def until(supervisor, condition, now_s=None):
    def looked():
        supervisor.poll(now_s)
        return condition()

    wait_until(looked, 20, "the supervisor")


def test_all_are_ready_and_their_steps_are_told(supervisor):
    workers = started(
        supervisor, plan("a", "step=loading", "ready", "sleep=60"), plan("b", "ready", "sleep=60")
    )
    assert [one.state for one in workers] == [WorkerState.READY] * 2
    assert ("a", "loading") in supervisor.steps


@pytest.mark.parametrize("script", [("failed=no memory", "exit=3"), ("exit=0",), ("kill=9",)])
def test_who_dies_before_all_were_ready_ends_it_all(supervisor, script):
    supervisor.start([plan("good", "ready", "sleep=60"), plan("bad", *script)])
    with pytest.raises(WorkerDied, match="bad worker"):
        until(supervisor, lambda: False)


def test_who_dies_later_is_started_again_and_the_others_stay(supervisor, tmp_path):
    first, other = started(
        supervisor,
        plan("first", "print=hello", "ready", "sleep=60"),
        plan("other", "ready", "sleep=60"),
    )
    old, kept = first.process.process.pid, other.process.process.pid
    first.process.process.kill()
    until(supervisor, lambda: first.state is WorkerState.WAITING)
    assert "killed by SIGKILL" in first.last_end
    until(supervisor, lambda: first.state is WorkerState.READY)
    assert first.process.process.pid != old
    assert first.num_restarts == 1
    assert (other.process.process.pid, other.num_restarts) == (kept, 0)
    assert (tmp_path / "first.log").read_text() == "hello\nhello\n"


def test_pauses_are_doubled_up_to_a_bound_and_forgotten_once_it_is_steady(supervisor):
    (worker,) = started(supervisor, plan("a", "ready", "sleep=60"))
    pauses, now_s = [], 1000.0
    for _ in range(8):
        worker.process.process.kill()
        worker.process.process.wait(10)
        supervisor.poll(now_s)
        pauses.append(worker.due_s - now_s)
        supervisor.poll(worker.due_s - 0.01)
        assert worker.state is WorkerState.WAITING
        now_s = worker.due_s
        supervisor.poll(now_s)
        assert worker.state is WorkerState.STARTING
    assert pauses == [PAUSE_S * 2**n for n in range(6)] + [PAUSE_MAX_S] * 2
    until(supervisor, lambda: worker.state is WorkerState.READY, now_s)
    supervisor.poll(now_s + STEADY_S - 1)
    assert worker.num_failures == 8
    supervisor.poll(now_s + STEADY_S)
    assert worker.num_failures == 0


def test_who_was_told_to_end_is_not_started_again(supervisor):
    (worker,) = started(supervisor, plan("a", "polite", "ready", "sleep=60"))
    worker.process.process.terminate()
    until(supervisor, lambda: worker.state is WorkerState.LEFT)
    supervisor.poll(1e9)
    assert (worker.state, worker.num_restarts) == (WorkerState.LEFT, 0)


def test_its_environment_is_the_given_one(supervisor, tmp_path):
    supervisor.environment = {"PYTHONPATH": str(TESTS), "LC_ALL": "C"}
    (worker,) = started(supervisor, plan("a", "ready", "sleep=60"))
    told = Path(f"/proc/{worker.process.process.pid}/environ").read_bytes().split(b"\0")
    assert {one.partition(b"=")[0] for one in told if one} == {b"PYTHONPATH", b"LC_ALL"}
