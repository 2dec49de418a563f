"""Processes that die, that will not die, that end with a code; and none is left."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from support.fixtures import num_open_files

from kvxfer.errors import DeadlineExceeded, WorkerDied
from kvxfer.launch import local
from kvxfer.launch.local import LocalLauncher, divide_budget

TESTS = Path(__file__).parent.parent
MODULE = "support.child_worker"


@pytest.fixture
def steps():
    return []


@pytest.fixture
def launcher(tmp_path, steps, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    files = num_open_files()
    found = LocalLauncher(tmp_path, lambda name, text: steps.append((name, text)))
    started = []
    start = found.start

    def remembering(name, *script):
        started.append(start(name, MODULE, [",".join(script)]))
        return started[-1]

    found.start = remembering
    yield found
    found.stop()
    for worker in started:
        assert not Path(f"/proc/{worker.process.pid}").exists(), "a process was left behind"
    assert num_open_files() == files


def wait_ready(launcher, *workers):
    launcher.wait_for(lambda: all(worker.is_ready for worker in workers), 20.0, "start")


def test_a_worker_tells_its_address_its_steps_and_that_it_is_ready(launcher, steps):
    worker = launcher.start("p", "listen=tcp://127.0.0.1:7", "step=loading", "ready", "sleep=60")
    wait_ready(launcher, worker)
    assert worker.address == "tcp://127.0.0.1:7"
    assert steps == [("p", "loading")]
    assert worker.ending() is None
    launcher.check()


def test_a_record_that_comes_in_two_parts_is_one_record(launcher):
    worker = launcher.start("p", "torn=0.1", "sleep=60")
    wait_ready(launcher, worker)


def test_what_it_writes_goes_to_its_log(launcher, tmp_path):
    worker = launcher.start("p", "print=hello there", "ready", "sleep=60")
    wait_ready(launcher, worker)
    assert (tmp_path / "p.log").read_text() == "hello there\n"


ENDINGS = [
    (["failed=no port left", "exit=2"], "ended with code 2: no port left", 2),
    (["print=first", "print=last words", "exit=3"], "ended with code 3: last words", 3),
    (["exit=1"], "ended with code 1: without a word", 1),
    (["exit=0"], "ended with code 0: without a word", 1),
    (["ready", "kill=9"], "was killed by SIGKILL", 1),
    (["kill=11"], "was killed by SIGSEGV", 1),
    (["kill=40"], "was killed by signal 40", 1),
    (["failed=told", "print=later words", "exit=1"], "ended with code 1: told", 1),
]


@pytest.mark.parametrize("script, text, code", ENDINGS)
def test_how_a_worker_ended_is_told_in_one_line(launcher, script, text, code):
    worker = launcher.start("decode", *script)
    with pytest.raises(WorkerDied) as died:
        launcher.wait_for(lambda: False, 20.0, "never")
    message = str(died.value)
    assert message == f"decode worker (pid {worker.process.pid}) {text}"
    assert died.value.exit_code == code


def test_a_death_is_noticed_even_when_the_condition_is_true(launcher):
    worker = launcher.start("p", "ready", "exit=1")
    worker.process.wait(20.0)
    with pytest.raises(WorkerDied):
        launcher.wait_for(lambda: True, 20.0, "anything")


def test_a_wait_has_a_deadline(launcher):
    launcher.start("p", "sleep=60")
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"^start of p: not within 0.2 s$"):
        launcher.wait_for(lambda: False, 0.2, "start of p")
    assert time.monotonic() - started < 5.0


def test_others_are_given_time_to_notice(launcher):
    first = launcher.start("first", "kill=9")
    second = launcher.start("second", "sleep=0.3", "failed=peer is lost", "exit=1")
    third = launcher.start("third", "ready", "sleep=60")
    wait_until(lambda: first.process.poll() is not None)
    endings = launcher.endings(timeout_s=1.5)
    texts = [str(ending) for ending in endings]
    assert len(texts) == 2
    assert "killed by SIGKILL" in texts[0]
    assert texts[1].endswith("peer is lost")
    assert second.process.poll() == 1
    assert third.ending() is None


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_endings_do_not_wait_once_all_have_ended(launcher):
    launcher.start("a", "exit=1")
    launcher.start("b", "exit=1")
    started = time.monotonic()
    assert len(launcher.endings(timeout_s=15.0)) == 2
    assert time.monotonic() - started < 10.0


def test_stop_is_kind_first_and_idempotent(launcher, tmp_path):
    polite = launcher.start("polite", "polite", "ready", "sleep=60")
    wait_ready(launcher, polite)
    started = time.monotonic()
    launcher.stop()
    launcher.stop()
    assert time.monotonic() - started < local.GRACE_S
    assert polite.process.returncode == 0


def test_who_ignores_sigterm_is_killed_after_one_grace_for_all(launcher):
    workers = [launcher.start(name, "stubborn", "ready", "sleep=60") for name in "abc"]
    wait_ready(launcher, *workers)
    started = time.monotonic()
    launcher.stop()
    assert time.monotonic() - started < 2 * local.GRACE_S
    assert [worker.process.returncode for worker in workers] == [-signal.SIGKILL] * 3


def test_who_is_killed_leaves_no_socket_and_others_keep_theirs(launcher, tmp_path, monkeypatch):
    """Of the connector `peer`, whose directory all workers of a user share."""
    monkeypatch.setenv("KVXFER_PEER_DIR", str(tmp_path))
    monkeypatch.setattr(local, "GRACE_S", 0.1)
    dead, other = tmp_path / "a.peer", tmp_path / "b.peer"
    worker = launcher.start("a", "stubborn", f"socket={dead}", "ready", "sleep=60")
    wait_ready(launcher, worker)
    assert dead.is_socket()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as alive:
        alive.bind(str(other))
        alive.listen()
        launcher.stop()
        assert worker.process.returncode == -signal.SIGKILL
        assert not dead.exists()
        assert other.is_socket()


def test_a_stopped_process_is_ended_too(launcher):
    worker = launcher.start("frozen", "ready", "sleep=60")
    wait_ready(launcher, worker)
    os.kill(worker.process.pid, signal.SIGSTOP)
    launcher.stop()
    assert worker.process.returncode in (-signal.SIGTERM, -signal.SIGKILL)


def test_leaving_the_block_ends_them_whatever_happened(launcher):
    with pytest.raises(RuntimeError, match="mine"), launcher:
        worker = launcher.start("p", "ready", "sleep=60")
        raise RuntimeError("mine")
    assert worker.process.returncode is not None
    assert launcher.endings(0.1) == []
    launcher.check()


def test_workers_are_out_of_reach_of_ctrl_c(launcher):
    worker = launcher.start("p", "ready", "sleep=60")
    wait_ready(launcher, worker)
    assert os.getsid(worker.process.pid) == worker.process.pid != os.getsid(0)


def test_a_start_that_fails_leaves_no_descriptor(tmp_path):
    files = num_open_files()
    launcher = LocalLauncher(tmp_path / "absent", lambda name, text: None)
    with pytest.raises(OSError, match="absent"):
        launcher.start("p", MODULE, [])
    launcher.stop()
    assert num_open_files() == files


def test_budgets_are_equal_parts_of_most_of_what_is_free():
    assert divide_budget(3000, 3, 10_000) == 920
    assert divide_budget(3000, 3, 500) == 500
    assert divide_budget(0, 3, 500) == 0
    assert 3 * divide_budget(10**12, 3, 10**12) <= 0.92 * 10**12
