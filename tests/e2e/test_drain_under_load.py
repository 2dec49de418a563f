"""Workers that come and go by the router's HTTP routes, while OpenAI's client asks without a pause:
no request fails, and each answer is right to the last token.

`kvxfer router` as a user runs it, before worker processes without a model.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.client_load import KINDS, ClientLoad
from support.commands import ROOT, TINY_MODEL
from support.running import wait_until
from support.served import Served, ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
pytest.importorskip("openai")

ROLES = ("prefill", "decode")
CONCURRENCY = 10
ROUNDS = 3
BETWEEN = 30
"""Requests that end between two changes."""
OPTIONS = (
    *("--model", "pattern", "--device", "cpu", "--connector", "nixl"),
    *("--kv-cache-memory-bytes", str(32 << 20), "--block-size", "8"),
)


class Workers:
    """Processes of their own, which listen on loopback. A context: none outlives it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._undo = ExitStack()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def start(self, *names: str) -> list[str]:
        """Their addresses, once they listen."""
        for name in names:
            command = [sys.executable, "-m", f"{name.split('-')[0]}.null", *OPTIONS]
            with self._log(name).open("wb") as log:
                process = subprocess.Popen(
                    [*command, "--worker-id", name], cwd=ROOT, stdin=subprocess.DEVNULL,
                    stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(self._directory)},
                )  # fmt: skip
            self._undo.callback(_end, process)
            self.processes[name] = process
        return [self._address(name) for name in names]

    def _log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def text(self, name: str) -> str:
        return self._log(name).read_text(errors="replace")

    def _address(self, name: str) -> str:
        wait_until(lambda: "listens on" in self.text(name), 60, f"{name} to listen")
        return self.text(name).split("listens on ")[1].split()[0]

    def code_of(self, name: str) -> int:
        """Its exit code, once it has ended by itself."""
        return self.processes[name].wait(60)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait(10)


@pytest.fixture
def workers(tmp_path: Path, leaves_nothing_behind: None) -> Iterator[Workers]:
    with Workers(tmp_path) as found:
        yield found


class Admin:
    """The router's routes for whoever runs it."""

    def __init__(self, url: str) -> None:
        self._url = url

    def workers(self) -> dict[str, Any]:
        return {one["id"]: one for one in ask(self._url + "/workers")["workers"]}

    def add(self, address: str, role: str) -> None:
        told = {"address": address, "role": role}
        assert ask(self._url + "/workers", told) == told

    def drain(self, name: str) -> None:
        assert ask(f"{self._url}/workers/{name}/drain", {}) == {"id": name}

    def is_ready(self, name: str) -> bool:
        """It is there, and KV can flow to it or from it."""
        known = self.workers()
        lanes = {(one["id"], lane["peer"]) for one in known.values() for lane in one["lanes"]}
        is_met = any(name in pair for pair in lanes)
        return name in known and known[name]["state"] == "ready" and is_met

    def is_busy(self, name: str) -> bool:
        return bool(self.workers()[name]["num_requests"])

    def is_idle(self) -> bool:
        return all(
            one["num_requests"] == 0
            and one["cache"]["blocks_used"] + one["cache"]["blocks_quarantined"] == 0
            for one in self.workers().values()
        )


def turn_over(turn: int, workers: Workers, admin: Admin, load: ClientLoad) -> None:
    """A new pair joins, then the oldest one, at work, is drained, both of it at once."""
    oldest = [f"{role}-{turn}" for role in ROLES]
    newest = [f"{role}-{turn + 2}" for role in ROLES]
    for role, address in zip(ROLES, workers.start(*newest), strict=True):
        admin.add(address, role)
    wait_until(lambda: all(map(admin.is_ready, newest)), 60, f"{newest} to join")
    load.wait_for_more(BETWEEN, 60)
    for name in oldest:
        wait_until(lambda name=name: admin.is_busy(name), 30, f"{name} to have some")
        admin.drain(name)
    assert [workers.code_of(name) for name in oldest] == [0, 0]
    load.wait_for_more(BETWEEN, 60)


def test_no_request_is_lost_while_workers_join_and_leave(workers: Workers, tmp_path: Path) -> None:
    first = [f"{role}-{index}" for role in ROLES for index in (0, 1)]
    last = {f"{role}-{index}" for role in ROLES for index in (ROUNDS, ROUNDS + 1)}
    addresses = workers.start(*first)
    options = ("--model", str(TINY_MODEL), "--served-model-name", "pattern", "--enable-admin",
               "--port", "0", "--prefill", *addresses[:2], "--decode", *addresses[2:])  # fmt: skip
    with Served(tmp_path, *options, command="router") as router:
        admin = Admin(router.url())
        wait_until(lambda: all(map(admin.is_ready, first)), 60, "all four workers")
        with ClientLoad(router.url(), "pattern", CONCURRENCY) as load:
            load.wait_for_more(BETWEEN, 60)
            for turn in range(ROUNDS):
                turn_over(turn, workers, admin, load)
        told = load.check()
        print(f"\n{len(load.answered)} requests: {dict(told)}")
        assert {one.partition(": ")[0] for one in told} == set(KINDS)
        assert {one.partition(": ")[2] for one in told} == {"length", "stop"}
        served_by = {name for one in load.answered for name in one.pair}
        assert served_by == set(workers.processes), "each had its share"
        wait_until(admin.is_idle, 30, "all blocks are free")
        assert set(admin.workers()) == last
        assert router.end(signal.SIGTERM) < 30
    for name in last:
        workers.processes[name].send_signal(signal.SIGTERM)
    assert [workers.code_of(name) for name in last] == [0] * 4
    for name in workers.processes:
        assert "Traceback" not in workers.text(name), name
    assert sorted(one.name for one in tmp_path.iterdir() if one.suffix != ".log") == ["err", "out"]
