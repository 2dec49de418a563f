"""Ctrl-C of `kvxfer serve`, whatever it does: nothing stays behind, and answers end as errors.

It takes less than 2 s on a machine that does nothing else. Here the limit is generous: how quick a
busy machine is says nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path

import psutil
import pytest
from support.commands import TINY_MODEL
from support.running import wait_until
from support.served import Served

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_nothing_behind")]
LIMIT_S = 10.0
NUM_STREAMS = 8
OPTIONS = ("--model", str(TINY_MODEL), "--served-model-name", "tiny", "--port", "0",
           "--kv-cache-memory-bytes", str(32 << 20))  # fmt: skip
STARTING: dict[str, Callable[[Served, Path], bool]] = {
    "before any worker": lambda one, tmp: bool(list(tmp.glob("kvxfer-serve-*"))),
    "workers are processes": lambda one, tmp: len(tree(one.process.pid)) == 2,
    "importing torch": lambda one, tmp: "importing torch" in one.err.read_text(),
    "loading": lambda one, tmp: ": loading" in one.err.read_text(),
    "connectors": lambda one, tmp: "starting connectors" in one.err.read_text(),
    "warming up": lambda one, tmp: "warming up" in one.err.read_text(),
    "registering": lambda one, tmp: "committing and registering" in one.err.read_text(),
}


def tree(pid: int) -> list[int]:
    return [one.pid for one in psutil.Process(pid).children(recursive=True)]


def leaves(served: Served, directory: Path, number: signal.Signals = signal.SIGINT) -> int:
    """Its exit code, once it has ended and was looked for."""
    children = tree(served.process.pid)
    served.process.send_signal(number)
    code = served.process.wait(LIMIT_S)
    assert not [pid for pid in children if psutil.pid_exists(pid)]
    assert "Traceback" not in served.err.read_text(), served.err.read_text()
    # A directory for peers' sockets is each user's, and torch has one for what it compiles.
    caches = {f"kvxfer-{os.getuid()}", *(one.name for one in directory.glob("torchinductor_*"))}
    assert {one.name for one in directory.iterdir()} - caches == {"out", "err"}
    for cache in caches:
        assert [one for one in directory.glob(f"{cache}/**/*") if one.is_socket()] == []
    return code


@pytest.mark.parametrize("phase", STARTING)
def test_while_it_starts(phase: str, tmp_path: Path) -> None:
    with Served(tmp_path, *OPTIONS) as served:
        wait_until(lambda: STARTING[phase](served, tmp_path), 120, phase)
        assert leaves(served, tmp_path) in (0, 130), served.err.read_text()
        assert served.out.read_text() == "", "it never was ready"


def test_sigterm_while_it_starts(tmp_path: Path) -> None:
    """Nothing is under way that would have to be waited for."""
    with Served(tmp_path, *OPTIONS) as served:
        wait_until(lambda: STARTING["importing torch"](served, tmp_path), 120, "a step")
        assert leaves(served, tmp_path, signal.SIGTERM) in (0, 130), served.err.read_text()


def test_while_nothing_is_under_way(tmp_path: Path) -> None:
    with Served(tmp_path, *OPTIONS) as served:
        url = served.url()
        served.complete()
        assert leaves(served, tmp_path) == 0
        is_closed(url)


def test_while_streams_are_under_way(tmp_path: Path) -> None:
    """Each of them ends as an error, and none looks whole."""
    with Served(tmp_path, *OPTIONS) as served, ExitStack() as undo:
        url = served.url()
        streams = [undo.enter_context(stream(url)) for _ in range(NUM_STREAMS)]
        begun = [one.readline() for one in streams]
        assert all(line.startswith(b"data: {") for line in begun)
        assert leaves(served, tmp_path) == 0
        for one in streams:
            told = one.read()
            assert b"[DONE]" not in told
            last = told.rstrip().rpartition(b"data: ")[2]
            assert "shutting down" in json.loads(last)["error"]["message"]
        is_closed(url)


def stream(url: str) -> contextlib.closing[HTTPResponse]:
    body = {"model": "tiny", "prompt": "HAMLET.\nTo be", "max_tokens": 1900, "stream": True,
            "ignore_eos": True}  # fmt: skip
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    return contextlib.closing(urllib.request.urlopen(request, timeout=60))


def is_closed(url: str) -> None:
    port = urllib.parse.urlsplit(url).port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
