"""`kvxfer serve` as a user runs it: ready, asked, a worker killed, drained, gone."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import KVXFER, TINY_MODEL, run
from support.running import wait_until
from support.served import Served, ask

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


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    config = tmp_path / "kvxfer.toml"
    config.write_text(FILE)
    variables = {"KVXFER_CONFIG": str(config), "KVXFER_BLOCK_SIZE": "8", "KVXFER_DECODE": "1"}
    with Served(tmp_path, **variables) as found:
        yield found


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
