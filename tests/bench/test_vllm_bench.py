"""The parts of `kvxfer bench vllm` that need no vLLM. With it: tests/e2e/test_vllm.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.commands import KVXFER
from support.running import wait_until

from kvxfer.bench.vllm.client import Answer, EngineClient, EngineError
from kvxfer.bench.vllm.connectors import CONNECTORS
from kvxfer.bench.vllm.digests import KvDigests
from kvxfer.bench.vllm.engine import Engine, running
from kvxfer.bench.vllm.figures import HandedOver, summary_figures
from kvxfer.bench.vllm.handover import Moved, hand_over
from kvxfer.bench.vllm.options import VllmOptions
from kvxfer.bench.vllm.prompts import Prompts
from kvxfer.bench.vllm.session import kill_session, members
from kvxfer.errors import UsageError, WorkerDied
from kvxfer.model.tiny import MODEL_DIR

OPTIONS = VllmOptions(vllm_python=Path(sys.executable))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vllm_python", Path("/nowhere/python")),
        ("connector", ("lmcache",)),
        ("connector", ()),
        ("runs", 0),
        ("block_size", 16),
        ("prompt_lengths", (20, 2040)),
        ("prompt_lengths", (1,)),
    ],
)
def test_bad_options_are_named(field: str, value: object) -> None:
    OPTIONS.check()
    with pytest.raises(UsageError) as raised:
        replace(OPTIONS, **{field: value}).check()
    assert raised.value.field == field


def test_connectors_are_configured_as_vllm_wants_them() -> None:
    ours = json.loads(CONNECTORS["kvxfer"].transfer_config("kv_producer"))
    assert ours["kv_connector"] == "KvxferConnector"
    assert ours["kv_connector_module_path"] == "connectors.vllm"
    assert ours["kv_role"] == "kv_producer"
    theirs = json.loads(CONNECTORS["nixl"].transfer_config("kv_consumer"))
    assert (theirs["kv_connector"], theirs["kv_role"]) == ("NixlConnector", "kv_consumer")


def test_no_two_prompts_begin_alike() -> None:
    prompts = list(Prompts(MODEL_DIR).rounds((20, 500), 20))
    assert [len(one) for one in prompts] == [20, 500] * 20
    assert len({tuple(one[:20]) for one in prompts}) == 40
    assert {one[0] for one in prompts} == {256}, "<bos>"


def test_digests_compare_values_not_layouts() -> None:
    """Of two engines, whose blocks lie differently in memory and have other ids."""
    layers = [torch.randn(4, 2, 32, 8) for _ in range(3)]
    for layer in layers:
        layer[0] = 0
    other = [one.flip(0).transpose(1, 2).contiguous().transpose(1, 2) for one in layers]
    mine, theirs = (_digests(caches) for caches in (layers, other))
    assert mine[0] == "" and len(set(mine)) == 4
    assert theirs == mine[::-1]
    layers[2][1, 1, 31, 7] += 1
    assert [a == b for a, b in zip(_digests(layers), mine, strict=True)] == [1, 0, 1, 1]


def _digests(caches: list[torch.Tensor]) -> list[str]:
    worker = KvDigests()
    worker.model_runner = SimpleNamespace(kv_caches=caches)
    return worker.kv_block_digests()


RIGHT = HandedOver(
    length=100,
    prefill_s=0.1,
    answer=Answer((1,), 0.1, 0.2),
    moved=Moved(1, 0.01, 4096, 8, 0),
    is_right=True,
    whole_blocks=3,
    equal_blocks=3,
)


@pytest.mark.parametrize(
    "wrong",
    [
        {"is_right": False},
        {"equal_blocks": 2},
        {"moved": Moved(0, 0.0, 0, 0, 0)},
        {"moved": Moved(1, 0.01, 4096, 8, 1)},
    ],
    ids=lambda wrong: str(wrong),
)
def test_what_is_wrong_misses_its_bar(wrong: dict) -> None:
    assert all(one.ok for one in summary_figures("kvxfer", [RIGHT], 0, 1.0, True))
    found = summary_figures("kvxfer", [RIGHT, replace(RIGHT, **wrong)], 0, 1.0, True)
    assert sum(not one.ok for one in found) == 1
    assert sum(not one.ok for one in summary_figures("kvxfer", [RIGHT], 3, 1.0, True)) == 1
    theirs = summary_figures("nixl", [RIGHT, replace(RIGHT, **wrong)], 0, 1.0, False)
    assert all(one.ok for one in theirs) == ("moved" in wrong)


class _Handler(BaseHTTPRequestHandler):
    """Answers as vLLM does, and keeps what it was sent."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.headers["X-Request-Id"], body))
        if body["prompt"] == [13]:
            self._send(400, {"error": "no such luck"})
        elif body.get("stream"):
            events = [{"choices": [{"token_ids": [one]}]} for one in (7, 8)]
            lines = [f"data: {json.dumps(one)}\n\n" for one in events]
            end = "" if body["prompt"] == [14] else "data: [DONE]\n\n"
            self._send(200, "".join(lines) + end)
        else:
            self._send(200, {"kv_transfer_params": {"do_remote_prefill": True, "x": [[1]]}})

    def _send(self, status: int, body: object) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as found:
        found.asked = []
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.shutdown()
        thread.join(10)


def test_the_two_steps_of_a_request(server: ThreadingHTTPServer) -> None:
    """What the producer told goes to the consumer as it is, under the same request id."""
    client = EngineClient("both", server.server_address[1])
    answer, _ = hand_over(client, client, [5, 6], 2)
    assert answer.tokens == (7, 8)
    (first_id, first), (second_id, second) = server.asked
    assert first["max_tokens"] == 1 and first["kv_transfer_params"]["do_remote_decode"]
    assert second["kv_transfer_params"] == {"do_remote_prefill": True, "x": [[1]]}
    assert first_id == second_id and second["max_tokens"] == 2
    with pytest.raises(EngineError, match=r"400.*no such luck"):
        client.prefill([13], "id")
    with pytest.raises(EngineError, match="broke off"):
        client.complete([14], 2)


def test_an_engine_that_is_not_there_is_an_error() -> None:
    client = EngineClient("gone", 9)
    assert not client.is_healthy()
    with pytest.raises(EngineError, match="gone: /metrics"):
        client.metrics()


def test_an_engine_that_ends_at_its_start_says_why(tmp_path: Path) -> None:
    engine = Engine("one", replace(OPTIONS, vllm_python=Path(sys.executable)), tmp_path)
    why = r"one engine ended with code 1: .*vllm"
    with pytest.raises(WorkerDied, match=why), running([engine], 60.0):
        pass
    assert engine.process is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda one: one.name)
def test_the_engine_ends_with_the_bench(tmp_path: Path, number: signal.Signals) -> None:
    """All of its processes; here one that never gets ready."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho $$ > "$0.pid"\nexec sleep 100\n')
    program.chmod(0o755)
    command = [*KVXFER, "bench", "vllm", "--vllm-python", str(program)]
    bench = subprocess.Popen([*command, "--log-dir", str(tmp_path)], stderr=subprocess.DEVNULL)
    try:
        pid = tmp_path / "python.pid"
        wait_until(lambda: pid.exists() and pid.read_text() != "", 60.0, "an engine starts")
        bench.send_signal(number)
        assert bench.wait(20) != 0
        session = int(pid.read_text())
        wait_until(lambda: members(session) == [], 10.0, "it ends")
    finally:
        bench.kill()
        bench.wait(10)


FAMILY = """
import os, time
from multiprocessing import shared_memory
if not os.fork():
    shared = shared_memory.SharedMemory("{name}", create=True, size=4096)
    print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_session_leaves_nothing() -> None:
    name = f"kvxfer-test-{os.getpid()}"
    family = subprocess.Popen(
        [sys.executable, "-c", FAMILY.format(name=name)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert family.stdout is not None and family.stdout.readline() == b"ready\n"
        assert len(members(family.pid)) >= 2 and Path(f"/dev/shm/{name}").exists()
    finally:
        kill_session(family.pid, 10.0)
        family.wait(10)
        family.stdout.close()
    assert members(family.pid) == []
    assert not Path(f"/dev/shm/{name}").exists()
