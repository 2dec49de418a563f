"""`kvxfer bench connectors` between two machines: here two programs, and two network namespaces."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from kvxfer.bench.connectors.dial import Session
from kvxfer.bench.connectors.far import (
    ARGUMENTS,
    RESULTS,
    VERSION,
    Begin,
    Busy,
    Call,
    Failed,
    FarChannel,
    Result,
    host_of,
    pack,
    tcp_address,
    unpack,
)
from kvxfer.bench.connectors.listen import Server, why_not
from kvxfer.bench.connectors.moves import Aim
from kvxfer.bench.connectors.report import Report, read_report
from kvxfer.bench.netns import ADDRESSES, Namespaces
from kvxfer.bench.netns import why_not as why_no_namespaces
from kvxfer.control.auth import make_key_pair
from kvxfer.errors import UsageError, WireError, WorkerDied
from kvxfer.transfer.connector import Direction

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, "-P", "-m", "kvxfer.cli", "bench", "connectors"]
TINY = ["--block_sizes", "64KiB", "--batch_sizes", "1,4", "--num_iter", "3", "--warmup_iter", "1"]
START_S = 60.0


@contextmanager
def program(
    *words: str, before: tuple[str, ...] = (), start_new_session: bool = False
) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [*before, *COMMAND, *words], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT,
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=start_new_session,
    )  # fmt: skip
    try:
        yield started
    finally:
        started.send_signal(signal.SIGINT)
        try:
            started.communicate(timeout=START_S)
        except subprocess.TimeoutExpired:
            started.kill()
            started.communicate()


def address_of(listener: subprocess.Popen[str]) -> str:
    """What it prints first."""
    assert listener.stdout is not None
    assert select.select([listener.stdout], [], [], START_S)[0]
    found = re.search(r"listening at (\S+);", line := listener.stdout.readline())
    assert found, line
    return found[1]


@pytest.fixture
def server() -> Iterator[tuple[str, Server]]:
    """In a thread, which owns its sockets."""
    found: list[tuple[str, Server]] = []
    is_over = threading.Event()

    def work() -> None:
        channel = FarChannel("far", "tcp://127.0.0.1:0", None)
        made = Server(channel, "a machine", "127.0.0.1")
        found.append((channel.address, made))
        while not is_over.is_set():
            made.turn()
        made.end()
        channel.close()

    thread = threading.Thread(target=work)
    thread.start()
    while not found:
        time.sleep(0.01)
    yield found[0]
    is_over.set()
    thread.join(START_S)
    assert not thread.is_alive()


def session(address: str, **changes: object) -> Session:
    begin = Begin(**{"version": VERSION, "device": "cpu", "backend": ""} | changes)  # type: ignore[arg-type]
    return Session(FarChannel(f"near-{time.monotonic_ns()}", None, None), address, begin)


def test_a_far_end_serves_one_at_a_time_and_the_next_after_it(server) -> None:
    address, _ = server
    with session(address) as first:
        assert first.begin().machine == "a machine"
        with session(address) as second, pytest.raises(WorkerDied, match="busy with somebody"):
            second.begin()
    with session(address) as third:
        assert third.begin().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": VERSION + 1}, "version"),
        ({"device": "cuda:200"}, "no device 'cuda:200'"),
        ({"device": "/dev/null"}, "no device"),
        ({"backend": "POSIX"}, "no backend 'POSIX'"),
        ({"backend": "../x"}, "no backend"),
    ],
)
def test_a_session_that_cannot_be_says_why(server, changes: dict[str, object], reason: str) -> None:
    with session(server[0], **changes) as one, pytest.raises(WorkerDied, match=reason):
        one.begin()


def test_nothing_else_is_called_than_what_is_listed(server) -> None:
    """And the session goes on."""
    with session(server[0]) as one:
        one.begin()
        for verb, arguments in (
            ("__class__", b"\x90"),
            ("grow", b"\x91\x05"),
            ("aim", b"\x91\x05"),
        ):
            one.tell(Call(verb, arguments))
            answers: list[object] = []
            deadline_s = time.monotonic() + 10
            while not answers and time.monotonic() < deadline_s:
                answers = [m for m in one.hear() if isinstance(m, Failed | Result)]
            (answer,) = answers
            assert isinstance(answer, Failed)
            assert not answer.is_over
            assert verb in answer.error


def test_what_travels_is_typed() -> None:
    aim = Aim(Direction.PULL, (3, 1), (2, 5), 8, 20)
    assert unpack(ARGUMENTS, "aim", pack(ARGUMENTS, "aim", (aim,))) == (aim,)
    assert unpack(RESULTS, "wipe", pack(RESULTS, "wipe", None)) is None
    with pytest.raises(WireError, match="grow"):
        pack(ARGUMENTS, "grow", (5,))
    with pytest.raises(WireError, match="aim"):
        unpack(ARGUMENTS, "aim", msgspec.msgpack.encode((5,)))
    with pytest.raises(WireError, match="verify"):
        unpack(RESULTS, "verify", msgspec.msgpack.encode("yes"))
    assert why_not(Begin(VERSION, "cpu", "UCX")) == ""


def test_addresses_are_taken_with_and_without_their_scheme() -> None:
    assert tcp_address("peer", "10.0.0.1:5#a") == "tcp://10.0.0.1:5#a"
    assert host_of("tcp://[::1]:5700#a") == "::1"
    with pytest.raises(UsageError, match="peer: 'ipc:///x'"):
        tcp_address("peer", "ipc:///x")


def test_busy_is_a_word_of_its_own() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Busy())) == {"type": "Busy"}


@pytest.mark.slow
def test_a_far_end_that_is_killed_is_told_and_what_was_found_kept(
    tmp_path: Path, leaves_nothing_behind
) -> None:
    """The far end's process dies; the far end itself serves the next."""
    path = tmp_path / "bench.json"
    with program("--listen", "127.0.0.1:0") as far:
        words = ["--peer", address_of(far), "--connectors", "nixl", "--json", str(path)]
        with program(*words, *TINY[:-4], "--num_iter", "300") as near:
            deadline_s = time.monotonic() + START_S
            while not path.exists() and time.monotonic() < deadline_s:
                time.sleep(0.1)  # until the first row is there
            ends_of(far.pid)[0].kill()
            printed, _ = near.communicate(timeout=START_S)
        assert near.returncode == 1, printed
        assert "the target's process ended with code -9" in printed
        report = read_report(path)
        assert not report.is_complete
        assert report.rows[0].problem == ""
        assert report.rows[-1].problem
        assert run_once(*words, *TINY) == 0
    assert read_report(path).is_complete


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_found_and_nothing_else(
    tmp_path: Path, leaves_nothing_behind
) -> None:
    """As from a terminal: the whole group is told."""
    path = tmp_path / "bench.json"
    words = [*TINY[:-4], "--num_iter", "500", "--connectors", "nixl,peer", "--json", str(path)]
    with program(*words, start_new_session=True) as near:
        deadline_s = time.monotonic() + START_S
        while not path.exists() and time.monotonic() < deadline_s:
            time.sleep(0.1)  # until the first row is there
        ends = ends_of(near.pid)
        os.killpg(near.pid, signal.SIGINT)
        printed, _ = near.communicate(timeout=START_S)
    assert near.returncode == 130, printed
    assert "Traceback" not in printed
    report = read_report(path)
    assert not report.is_complete
    assert [row.problem == "" for row in report.rows[:1]] == [True]
    assert report.problems == ["stopped by the user"]
    assert ends
    assert not any(end.is_running() for end in ends)


def ends_of(pid: int) -> list[psutil.Process]:
    """The process that a listener started, which multiprocessing's own helper is not."""
    return [
        one
        for one in psutil.Process(pid).children()
        if "resource_tracker" not in " ".join(one.cmdline())
    ]


def run_once(*words: str) -> int:
    with program(*words) as near:
        near.communicate(timeout=4 * START_S)
        return near.returncode


@pytest.mark.slow
def test_two_namespaces_are_measured_with_keys(tmp_path: Path, leaves_nothing_behind) -> None:
    """As two machines, and over the link: both keep to TCP there."""
    if reason := why_no_namespaces():
        pytest.skip(f"no network namespaces: {reason}")
    path = tmp_path / "bench.json"
    for side in ("near", "far"):
        make_key_pair(tmp_path / side, side)
    for side, other in (("near", "far"), ("far", "near")):
        keys = tmp_path / side / "peers"
        keys.mkdir(mode=0o700)
        (keys / f"{other}.pub").write_text((tmp_path / other / f"{other}.pub").read_text())
        (keys / f"{other}.pub").chmod(0o600)

    def identity(side: str) -> list[str]:
        own = tmp_path / side
        return ["--key-file", str(own / f"{side}.key"), "--peer-keys", str(own / "peers")]

    with Namespaces() as spaces:
        into = {side: tuple(spaces.entering(side)) for side in ADDRESSES}
        address = f"tcp://{ADDRESSES['right']}:0"
        with program("--listen", address, *identity("far"), before=into["right"]) as far:
            words = ["--peer", address_of(far), *identity("near"), "--json", str(path)]
            sent = spaces.sent_bytes("left")
            with program(*words, *TINY, "--connectors", "nixl", before=into["left"]) as near:
                printed, _ = near.communicate(timeout=4 * START_S)
            assert near.returncode == 0, printed
            report = read_report(path)
            assert spaces.sent_bytes("left") - sent > moved(report, "WRITE")
    assert report.is_complete
    assert {row.kind.operation for row in report.rows} == {"WRITE", "READ"}
    assert {row.ceiling.split(" of ")[0] for row in report.rows} == {"socket"}


def moved(report: Report, operation: str) -> int:
    return sum(row.verified_bytes for row in report.rows if row.kind.operation == operation)
