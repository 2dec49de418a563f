"""Workers that are killed, and users who lose patience.

By default all processes are forked from one that has imported what they need, but for the test that
is about imports; with --slow they are also started as a user starts them.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest
from support.commands import Finished
from support.fork_server import ForkServer
from support.running import Running, end, log_says, running_demo, traced, wait_until, worker

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

LONG = ("--max-new-tokens", "400")
"""Enough tokens to be hit in the middle."""


@pytest.fixture(params=["forked", pytest.param("started", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> ForkServer | None:
    found: ForkServer = request.getfixturevalue("fork_server")
    return found if request.param == "forked" else None


def wait_for_first_transfer(process: Running, logs: Path) -> None:
    def started() -> bool:
        assert process.poll() is None, process.communicate(timeout=10)
        roles = ("prefill", "decode")  # whoever starts transfers tells of it
        return any(traced(logs, role, "transfer_start") for role in roles)

    wait_until(started, 90, "first transfer")


@pytest.mark.parametrize(
    ("victim", "other"),
    [("decode", "prefill"), pytest.param("prefill", "decode", marks=pytest.mark.slow)],
)
def test_a_killed_worker_ends_the_demo_within_ten_seconds(
    victim: str, other: str, tmp_path: Path, server: ForkServer | None
) -> None:
    with running_demo(tmp_path, *LONG, server=server) as process:
        wait_for_first_transfer(process, tmp_path)
        killed_at = time.monotonic()
        worker(process, victim).kill()
        out, err = process.communicate(timeout=10)
        done = Finished(process.returncode, out, err)
    assert time.monotonic() - killed_at < 10
    assert done.code == 1, done
    assert f"{victim} worker" in done.err
    assert "SIGKILL" in done.err
    assert "Traceback" not in done.err
    assert log_says(tmp_path, other, f"peer {victim}-0 is lost"), "the other says so"
    assert f"{other} worker" in done.err, "and how it ended is told"
    assert "ended with code 1" in done.err


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_ctrl_c_ends_everything_within_two_seconds(
    number: signal.Signals, tmp_path: Path, server: ForkServer | None
) -> None:
    with running_demo(tmp_path, *LONG, server=server) as process:
        wait_for_first_transfer(process, tmp_path)
        workers = psutil.Process(process.pid).children()
        assert len(workers) == 3
        asked_at = time.monotonic()
        done = end(process, number, timeout_s=5)
        assert time.monotonic() - asked_at < 2
        assert done.code == 130
        assert not any(child.is_running() for child in workers)
    assert "Traceback" not in done.err


def test_ctrl_c_while_workers_are_still_importing(tmp_path: Path) -> None:
    with running_demo(tmp_path) as process:
        wait_until(lambda: log_says(tmp_path, "decode", "importing"), 60, "start of decode")
        workers = psutil.Process(process.pid).children()
        asked_at = time.monotonic()
        done = end(process, signal.SIGINT, timeout_s=5)
        assert time.monotonic() - asked_at < 2
        assert done.code == 130
        assert not any(child.is_running() for child in workers)


def test_workers_die_with_a_killed_launcher(tmp_path: Path, server: ForkServer | None) -> None:
    with running_demo(tmp_path, *LONG, server=server) as process:
        wait_for_first_transfer(process, tmp_path)
        workers = psutil.Process(process.pid).children()
        process.kill()
        _, alive = psutil.wait_procs(workers, timeout=5)
        assert not alive
