"""`kvxfer serve` as a user runs it: ready, asked, a worker killed, drained, gone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import KVXFER, ROOT, TINY_MODEL, run
from support.running import wait_until

FILE = f"""
model = "{TINY_MODEL}"
kv_cache_memory_bytes = 33554432
port = 0
[prefill]
workers = 2
block_size = 32
[router]
served_model_name = "tiny"
"""


class Served:
    """A `kvxfer serve`, whose output is read for what it says."""

    def __init__(self, directory: Path, *options: str, **variables: str) -> None:
        self.out, self.err = directory / "out", directory / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*KVXFER, "serve", *options], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out,
                stderr=err, env={**os.environ, "TMPDIR": str(directory), **variables},
            )  # fmt: skip

    def url(self) -> str:
        """Once it is ready."""

        def said() -> bool:
            assert self.process.poll() is None, self.err.read_text()
            return "\ncurl " in self.out.read_text()

        wait_until(said, 120, "ready")
        ready = self.out.read_text().splitlines()[0]
        assert ready.startswith("ready: http://127.0.0.1:"), ready
        return ready.split()[1]

    def complete(self, max_tokens: int = 8) -> str:
        body = {"model": "tiny", "prompt": "HAMLET.\nTo be", "max_tokens": max_tokens, "seed": 1}
        return str(ask(self.url() + "/v1/completions", body)["choices"][0]["text"])

    def end(self, number: int) -> float:
        """Seconds from the signal to the end, which is good."""
        began_s = time.monotonic()
        self.process.send_signal(number)
        assert self.process.wait(30) == 0, self.err.read_text()
        return time.monotonic() - began_s


def ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    config = tmp_path / "kvxfer.toml"
    config.write_text(FILE)
    found = Served(tmp_path, KVXFER_CONFIG=str(config), KVXFER_BLOCK_SIZE="8", KVXFER_DECODE="1")
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.kill()
        found.process.wait(10)
        assert [path.name for path in tmp_path.glob("kvxfer-serve-*")] == []


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_serve_from_start_to_end(served: Served, leaves_nothing_behind: None) -> None:
    url = served.url()
    first = served.complete()
    told = json.loads(run(*KVXFER, "status", "--url", url, "--json").out)
    assert sorted(one["name"] for one in told["processes"]) == [
        "decode-0",
        "prefill-0",
        "prefill-1",
    ]
    assert {one["state"] for one in told["workers"]} == {"ready"}
    victim = next(one for one in told["processes"] if one["name"] == "prefill-0")
    os.kill(victim["pid"], signal.SIGKILL)

    def is_back() -> bool:
        now = {one["name"]: one for one in ask(url + "/status")["processes"]}
        return now["prefill-0"]["num_restarts"] == 1 and now["prefill-0"]["state"] == "ready"

    assert served.complete() == first, "the other prefill worker serves"
    wait_until(is_back, 120, "the restart")
    assert "prefill-0 worker" in served.err.read_text()
    assert served.complete() == first
    shown = run(*KVXFER, "status", "--url", url)
    assert (shown.code, shown.err) == (0, "")
    assert "KV caches" in shown.out
    pids = children(served.process.pid)
    assert len(pids) == 3
    assert served.end(signal.SIGTERM) < 10
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    with pytest.raises(urllib.error.URLError):
        ask(url + "/status")


@pytest.mark.slow
def test_ctrl_c_while_workers_start_leaves_nothing(
    served: Served, leaves_nothing_behind: None
) -> None:
    wait_until(lambda: "importing torch" in served.err.read_text(), 60, "a step")
    pids = children(served.process.pid)
    assert pids
    took_s = served.end(signal.SIGINT)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert took_s < 5, "2 s on a machine that does nothing else"
    assert served.out.read_text() == ""


def test_a_worker_that_cannot_start_ends_serve_in_one_clear_line(
    tmp_path: Path, leaves_nothing_behind: None
) -> None:
    """Its own word is passed on, with its code."""
    done = run(
        *KVXFER, "serve", "--model", str(TINY_MODEL), "--port", "0", "--lane", "neither",
        "--decode", "1",
    )  # fmt: skip
    assert done.code == 2, done
    assert "Traceback" not in done.err
    assert "lane: 'neither'" in done.err.strip().splitlines()[-1]
    assert done.out == ""
