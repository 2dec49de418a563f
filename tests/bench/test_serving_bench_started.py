"""`kvxfer bench serving` with services of its own: processes, the bundled model, the command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.commands import KVXFER, ROOT, TINY_MODEL
from support.running import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("leaves_nothing_behind"),
]
SMALL = (
    *("--model", str(TINY_MODEL), "--random-input-len", "100", "--random-output-len", "12"),
    *("--random-range-ratio", "0.3", "--num-warmups", "2"),
)
WORKERS = "--kv-cache-memory-bytes 33554432"


@contextmanager
def bench(directory: Path, *words: str, workers: str = WORKERS) -> Iterator[subprocess.Popen[str]]:
    told = ("--worker-args", workers, "--json", str(directory / "out.json"), *words)
    command = [*KVXFER, "bench", "serving", *SMALL, *told]
    temporary = Path(tempfile.mkdtemp(prefix="kvt-"))  # short: sockets lie in it
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)
    left = [path.name for path in temporary.iterdir() if path.name.startswith("kvxfer-serv")]
    shutil.rmtree(temporary)
    assert left == []


def figures(directory: Path) -> dict[str, Any]:
    found = json.loads((directory / "out.json").read_text())
    return {one["metric"].removeprefix("serving, "): one for one in found}


def serve_process(process: subprocess.Popen[str]) -> psutil.Process:
    for child in psutil.Process(process.pid).children():
        if "serve" in child.cmdline():
            return child
    raise AssertionError("no kvxfer serve")


def test_pd_is_compared_with_a_single_process_and_both_give_the_same(tmp_path: Path) -> None:
    words = ("--compare-single", "--verify", "--num-prompts", "12", "--runs", "2")
    with bench(tmp_path, *words, "--request-rate", "6", "--goodput", "ttft:5000") as process:
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, out + err
    found = figures(tmp_path)
    for side in ("P/D", "single"):
        assert found[f"{side}: of 24 requests failed"]["value"] == 0
        assert found[f"{side}: rounds that were whole"]["value"] == 2
        assert found[f"{side}: throughput, output tokens"]["value"] > 0
    for name in ("ttft, median", "itl, p99", "throughput, output tokens", "goodput, requests"):
        assert found[f"P/D to single: {name}"]["value"] > 0
    assert found["P/D: KV transfers, share of TTFT"]["value"] > 0
    assert found["P/D: KV hand-over, share of TTFT, median"]["value"] > 0
    assert "single: KV transfers, share of TTFT" not in found
    assert found["verified: could not be compared"]["value"] == 0
    assert found["verified: of 12 prompts' KV differs"]["value"] == 0
    assert found["verified: of 12 answers' tokens differ"]["value"] == 0
    assert "P/D (2 processes of 1 threads) against a single process of 2 threads" in out


@pytest.mark.parametrize("what", ["interrupt", "kill the service"])
def test_a_run_that_is_cut_short_keeps_what_it_found_and_leaves_nothing(
    tmp_path: Path, what: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = ({"timestamp": 100 * at, "input_length": 40, "output_length": 9} for at in range(3000))
    trace.write_text("".join(json.dumps(one) + "\n" for one in lines))
    metrics, serve = tmp_path / "prefill.trace.jsonl", None
    with bench(tmp_path, "--trace", str(trace), "--log-dir", str(tmp_path)) as process:
        wait_until(
            lambda: metrics.exists() and metrics.read_text().count("computed") > 10, 120, "load"
        )
        serve = serve_process(process)
        if what == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            serve.kill()
        out, err = process.communicate(timeout=60)
    assert process.returncode == (130 if what == "interrupt" else 1), out + err
    wait_until(lambda: not serve.is_running(), 10, "the end of kvxfer serve")
    found = figures(tmp_path)
    assert found["P/D: rounds that were whole"]["value"] == 0
    assert found["P/D: failed, not sent"]["value"] > 0
    assert found["P/D: ttft, median"]["value"] > 0
    assert "0 of 3 rounds were whole; what is told is of parts of rounds" in out
    assert "Traceback" not in err
    if what != "interrupt":
        assert "P/D, round 1 of 3: the service is gone" in err.splitlines()[-1]


def test_a_service_that_cannot_start_is_told_in_its_own_words(tmp_path: Path) -> None:
    with bench(tmp_path, workers="--block-size 0") as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 2, out + err
    assert "block_size: 0: must be at least 1" in err.splitlines()[-1]
    assert not (tmp_path / "out.json").exists()
