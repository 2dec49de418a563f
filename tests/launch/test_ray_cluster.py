"""`kvxfer launch ray` as a user runs it, on a real Ray cluster of three nodes: it serves, loses
workers and nodes, grows and shrinks under load, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.commands import KVXFER, TINY_MODEL, run
from support.keys import KeyRing
from support.models import HostEngine
from support.ray_nodes import RayNodes, actors
from support.running import wait_until
from support.served import Served, ask

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    # Of Ray's own code, as it starts and ends a cluster's nodes in this process.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning"),
]
OPTIONS = (
    *("ray", "--model", str(TINY_MODEL), "--served-model-name", "tiny", "--port", "0"),
    *("--kv-cache-memory-bytes", str(32 << 20), "--no-enable-prefix-caching", "--enable-admin"),
)
PROMPTS = ("HAMLET.\nTo be, or not to be", "MACBETH.\nIs this a dagger", "KING.\nNow is the winter")
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    with RayNodes(3) as found:
        yield found


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Tokens by prompt, of a single process."""
    from kvxfer.model.loader import inspect_model
    from kvxfer.model.runner import ModelRunner
    from kvxfer.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(TINY_MODEL)
    runner = ModelRunner.load(inspect_model(TINY_MODEL), "cpu", "float32", 1)
    engine = HostEngine(runner, num_blocks=16)
    found = {}
    for prompt in PROMPTS:
        sequence = engine.prefill(tokenizer.encode(prompt), list(range(1, 8)))
        engine.decode([sequence], NEW_TOKENS - 1)
        found[prompt] = sequence.answer
    runner.close()
    return found


class Launched(Served):
    """`kvxfer launch ray`, and what it says of its workers."""

    def __init__(self, directory: Path, cluster: RayNodes, *options: str) -> None:
        self.logs = directory / "logs"
        super().__init__(
            directory, *OPTIONS, "--log-dir", str(self.logs), *options,
            command="launch", RAY_ADDRESS=cluster.address,
        )  # fmt: skip

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        assert list(self.out.parent.glob("kvxfer-launch-*")) == []

    def status(self) -> dict[str, Any]:
        return dict(ask(self.url() + "/status"))

    def processes(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in self.status()["processes"]}

    def pids(self) -> list[int]:
        return [one["pid"] for one in self.processes().values()]

    def are_ready(self, *names: str) -> bool:
        """These and no others are there, and the router knows them."""
        told = self.status()
        there = {one["name"] for one in told["processes"] if one["state"] == "ready"}
        known = {one["id"] for one in told["workers"] if one["state"] == "ready"}
        every = {one["name"] for one in told["processes"]}
        return there == known == every == set(names)

    def answer(self, prompt: str) -> list[int]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        return list(ask(self.url() + "/v1/completions", body)["choices"][0]["token_ids"])

    def scale(self, **counts: int) -> None:
        flags = [word for role, count in counts.items() for word in (f"--{role}", str(count))]
        done = run(*KVXFER, "launch", "scale", "--url", self.url(), *flags)
        assert done.code == 0, done


def check_answers(launched: Launched, expected: dict[str, list[int]]) -> None:
    for prompt, tokens in expected.items():
        assert launched.answer(prompt) == tokens


def nothing_is_left(cluster: RayNodes, pids: list[int]) -> None:
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    wait_until(lambda: actors() == [], 10, "no actor is left")
    free, every = cluster.free_cpus()
    assert free == every > 0, "no placement group is left"


def test_it_serves_and_survives_workers_and_nodes_that_die(
    cluster: RayNodes, expected: dict[str, list[int]], tmp_path: Path, leaves_nothing_behind: None
) -> None:
    options = ("--prefill", "2", "--decode", "2", "--placement-group-strategy", "SPREAD")
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    with Launched(tmp_path, cluster, *options) as launched:
        launched.url()
        assert launched.are_ready(*names)
        check_answers(launched, expected)
        raylets = {cluster.raylet_of(pid) for pid in launched.pids()}
        assert len(raylets) == 3, "SPREAD uses each node"
        os.kill(launched.processes()["decode-0"]["pid"], signal.SIGKILL)
        wait_until(lambda: launched.processes()["decode-0"]["num_restarts"] == 1, 30, "a restart")
        check_answers(launched, expected)
        wait_until(lambda: launched.are_ready(*names), 120, "decode-0 to be back")
        assert "SIGKILL" in launched.processes()["decode-0"]["last_end"]
        check_answers(launched, expected)
        away = next(pid for pid in launched.pids() if not cluster.is_on_head(pid))
        hit = {
            name: one["num_restarts"]
            for name, one in launched.processes().items()
            if cluster.raylet_of(one["pid"]) == cluster.raylet_of(away)
        }
        cluster.kill_node_of(away)

        def is_lost() -> bool:
            now = launched.processes()
            return all(now[name]["num_restarts"] == hit[name] + 1 for name in hit)

        wait_until(is_lost, 60, "the node's workers to be started again")
        wait_until(lambda: launched.are_ready(*names), 120, f"{list(hit)} on other nodes")
        check_answers(launched, expected)
        check_logs(launched, names)
        pids = launched.pids()
        assert launched.end(signal.SIGINT) < 15, "3 s on a machine that does nothing else"
    nothing_is_left(cluster, pids)
    assert "Traceback" not in launched.err.read_text()
    cluster.add()


def check_logs(launched: Launched, names: tuple[str, ...]) -> None:
    for name in names:
        text = (launched.logs / f"{name}.log").read_text()
        lines = text.splitlines()
        assert all(re.match(r"\(pid=\d+, ip=[\d.]+\) ", line) for line in lines), name
        assert any(line.endswith("INFO ready") for line in lines), text
    pids = set(re.findall(r"pid=(\d+)", (launched.logs / "decode-0.log").read_text()))
    assert len(pids) >= 2, "of both of its lives"


class Load:
    """Threads that ask without a pause; each answer has to be right."""

    def __init__(self, launched: Launched, expected: dict[str, list[int]]) -> None:
        self.wrong: list[str] = []
        self.count = 0
        self._launched, self._expected = launched, expected
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on, args=(n,)) for n in range(4)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(120)
        assert not any(one.is_alive() for one in self._threads)

    def _ask_on(self, turn: int) -> None:
        while not self._is_over.is_set():
            prompt = PROMPTS[turn % len(PROMPTS)]
            turn += 1
            try:
                tokens = self._launched.answer(prompt)
                if tokens != self._expected[prompt]:
                    self.wrong.append(f"{prompt!r}: {tokens}")
            except OSError as error:
                self.wrong.append(f"{prompt!r}: {error}")
            self.count += 1

    def wait_for_more(self, count: int) -> None:
        wanted = self.count + count
        wait_until(lambda: self.count >= wanted, 60, f"{count} answers more")


def test_it_grows_and_shrinks_under_load_with_keys(
    cluster: RayNodes, expected: dict[str, list[int]], tmp_path: Path, leaves_nothing_behind: None
) -> None:
    ring = KeyRing(tmp_path)
    secret = ring.make("fleet")
    options = ("--key-file", str(secret), "--peer-keys", str(ring.allowed))
    with Launched(tmp_path, cluster, *options) as launched:
        launched.url()
        assert launched.are_ready("prefill-0", "decode-0")
        told = launched.status()["workers"]
        assert not any("127.0.0.1" in one["address"] for one in told), "its node's address"
        with Load(launched, expected) as load:
            load.wait_for_more(10)
            launched.scale(prefill=2, decode=2)
            four = ("prefill-0", "prefill-1", "decode-0", "decode-1")
            wait_until(lambda: launched.are_ready(*four), 150, "four workers")
            load.wait_for_more(20)
            launched.scale(prefill=1, decode=1)
            two = ("prefill-0", "decode-0")
            wait_until(lambda: launched.are_ready(*two), 60, "two workers")
            load.wait_for_more(10)
        assert load.wrong == []
        wait_until(lambda: sum(cluster.free_cpus()[:1]) == cluster.free_cpus()[1] - 2, 20, "room")
        refused = run(*KVXFER, "launch", "scale", "--url", launched.url(), "--decode", "0")
        refused.check_one_clear_line(1, "decode", "must be between")
        pids = launched.pids()
        shown = [" ".join(psutil.Process(pid).cmdline()) for pid in (*pids, *actors())]
        launched.end(signal.SIGTERM)
    nothing_is_left(cluster, pids)
    logs = [one.read_text() for one in (*launched.logs.iterdir(), launched.err)]
    assert secret.read_text().split()[1] not in "".join(logs + shown)
    last = (launched.logs / "decode-1.log").read_text().splitlines()[-1]
    assert last.partition(") ")[2] in launched.err.read_text(), "its log is there to the last line"


def test_ctrl_c_while_it_starts_leaves_nothing(
    cluster: RayNodes, tmp_path: Path, leaves_nothing_behind: None
) -> None:
    with Launched(tmp_path, cluster) as launched:
        wait_until(lambda: "importing torch" in launched.err.read_text(), 60, "a step")
        began_s = time.monotonic()
        launched.process.send_signal(signal.SIGINT)
        assert launched.process.wait(20) in (0, 130)
        assert time.monotonic() - began_s < 15
        assert launched.out.read_text() == ""
    nothing_is_left(cluster, [])


def test_a_launcher_that_is_killed_leaves_nothing(
    cluster: RayNodes, tmp_path: Path, leaves_nothing_behind: None
) -> None:
    """Ray ends what its driver had, and the kernel what an actor had."""
    with Launched(tmp_path, cluster) as launched:
        launched.url()
        pids = launched.pids()
        launched.process.kill()
        launched.process.wait(10)
        wait_until(lambda: not any(map(psutil.pid_exists, pids)), 30, "the workers' end")
        nothing_is_left(cluster, pids)
        for path in tmp_path.glob("kvxfer-launch-*"):
            path.rmdir()  # what a killed process cannot do itself


def test_more_workers_than_there_is_room_for(cluster: RayNodes, tmp_path: Path) -> None:
    done = run(
        *KVXFER, "launch", *OPTIONS, "--address", cluster.address, "--num-cpus", "2",
        "--prefill", "3", "--decode", "2", "--placement-timeout-s", "4",
    )  # fmt: skip
    assert done.code == 1, done
    last = done.err.strip().splitlines()[-1]
    for text in ("no room within 4 s", "5 workers (PACK) want 10 CPU", "CPU 2 + 2 + 2 (6 free)"):
        assert text in last, done.err
    assert "Traceback" not in done.err
    nothing_is_left(cluster, [])


def test_a_worker_that_cannot_start_ends_it_in_one_clear_line(cluster: RayNodes) -> None:
    done = run(*KVXFER, "launch", *OPTIONS, "--address", cluster.address, "--lane", "neither")
    assert done.code == 2, done
    assert "lane: 'neither'" in done.err.strip().splitlines()[-1]
    assert "Traceback" not in done.err
    nothing_is_left(cluster, [])


def test_without_a_cluster_it_starts_one_that_ends_with_it(tmp_path: Path) -> None:
    """As `ray.init()` does, where neither --address nor RAY_ADDRESS is given: only while no cluster
    runs on this host, so 'local' stands for it here."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="kvxfer-test-") as short,
        Served(
            tmp_path, *OPTIONS, "--address", "local", command="launch", RAY_TMPDIR=short
        ) as served,
    ):
        served.complete()
        raylets = [one.pid for one in psutil.process_iter() if "raylet" in one.name()
                   and served.process.pid in [up.pid for up in one.parents()]]  # fmt: skip
        assert len(raylets) == 1
        served.end(signal.SIGINT)
        assert not psutil.pid_exists(raylets[0])
