"""The service of deploy/README.md, 'Several hosts', started by the commands that stand there: each
process in a network namespace that is a host of its own (`kvxfer.bench.netns_hosts`).

Of a command nothing but addresses, names of workers and DIR is replaced; what tests need besides
is told by variables.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from support.commands import ROOT, TINY_MODEL
from support.running import wait_until
from support.single_process import EPSILON, SingleProcess

from kvxfer.bench.netns import enter
from kvxfer.bench.netns_hosts import Hosts

README = ROOT / "deploy" / "README.md"
SECTION = "Several hosts"
PREFILL, DECODE, ROUTER = "10.0.0.1", "10.0.0.2", "10.0.0.3"
"""Of the commands there."""
MODEL = "mine"
PORT = 8000
START_TIMEOUT_S = 90.0
CHUNK = 32
"""Tokens of a block and of a chunk: no bit depends on what was prefilled together."""
VARIABLES: Mapping[str, str] = {
    "KVXFER_MEMORY_BUDGET_BYTES": str(1 << 30),
    "KVXFER_BLOCK_SIZE": str(CHUNK),
    "KVXFER_MAX_NUM_BATCHED_TOKENS": str(CHUNK),
    "KVXFER_ENABLE_PREFIX_CACHING": "false",
    "KVXFER_KV_COMMIT": "elastic",
    "KVXFER_KV_INITIAL_BLOCKS": "24",
    "KVXFER_PEER_TIMEOUT_S": "3",
}
"""A small cache that grows; every prompt is handed over as a whole."""


def commands() -> dict[str, str]:
    """Blocks of the section by where they are run: 'anywhere 0', 'anywhere 1', and addresses."""
    text = README.read_text().partition(f"\n## {SECTION}\n")[2].partition("\n## ")[0]
    found: dict[str, str] = {}
    for where, command in re.findall(r"```bash\n# (anywhere|on \S+)\n(.*?)```", text, re.DOTALL):
        key = where.removeprefix("on ")
        found[f"{key} {sum(one.startswith(key) for one in found)}"] = command
    return {key if key.startswith("anywhere") else key.split()[0]: found[key] for key in found}


def advertised() -> str:
    """What the README has prefill say where its address is not one to bind."""
    found = re.search(r"`(--listen \S+ --advertise \S+)`", README.read_text())
    assert found is not None and f"tcp://{PREFILL}:5601" in found[1]
    return found[1]


@dataclass(frozen=True)
class Answer:
    prompt: list[int]
    max_tokens: int
    tokens: list[int]
    digests: list[str]
    pair: tuple[str, str]
    began_s: float
    ended_s: float = field(default_factory=time.monotonic)
    error: str = ""

    def check(self, single: SingleProcess) -> None:
        """That KV and tokens are those of a single process."""
        assert self.error == ""
        tokens, digests = single.answer(self.prompt, self.max_tokens, len(self.tokens))
        assert self.digests == digests
        if self.tokens != tokens:
            at = next(i for i, (a, b) in enumerate(zip(self.tokens, tokens, strict=True)) if a != b)
            assert single.gap([*self.prompt, *tokens[:at]]) < EPSILON


@dataclass(frozen=True)
class Placed:
    """A worker, and what differs from the README's."""

    name: str
    is_advertised: bool = False
    """Its host's address is not the one that it binds."""

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]


class SeveralHosts:
    """Workers, each on a host called as it is, and a router on `router_on`. A context."""

    def __init__(
        self,
        directory: Path,
        workers: Sequence[Placed],
        router_on: str,
        *,
        mtu: int = 1500,
        request_timeout_s: int = 120,
    ) -> None:
        self.directory = directory
        self.workers = {one.name: one for one in workers}
        self._router_on = router_on
        self._variables = {**VARIABLES, "KVXFER_REQUEST_TIMEOUT_S": str(request_timeout_s)}
        self._hosts = dict.fromkeys([*self.workers, router_on])
        self.hosts = Hosts(directory, list(self._hosts), mtu)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._undo = ExitStack()

    def __enter__(self) -> SeveralHosts:
        with ExitStack() as undo:
            undo.enter_context(self.hosts)
            for index, name in enumerate(self.workers, 1):
                self._lead_nowhere(name, index)
            self._make_keys()
            undo.callback(self._end)
            for name in [*self.workers, "router-0"]:
                self.start(name)
            there = self.hosts.net(self._router_on)
            self.pool = undo.enter_context(
                ThreadPoolExecutor(16, initializer=enter, initargs=(there,))
            )
            self.client = undo.enter_context(
                openai.OpenAI(
                    base_url=f"http://{self.router_ip}:{PORT}/v1",
                    api_key="none",
                    timeout=120,
                    max_retries=0,
                )
            )
            self.until(self._is_ready, START_TIMEOUT_S, "all pairs")
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def command(self, name: str) -> str:
        """The README's, of the worker or router called `name`."""
        if name == "router-0":
            text = commands()[ROUTER].replace(f"--host {ROUTER}", f"--host {self.router_ip}")
            for role, address in (("prefill", PREFILL), ("decode", DECODE)):
                one = f"tcp://{address}:5601#{role}-0"
                assert one in text
                named = [worker for worker in self.workers.values() if worker.role == role]
                text = text.replace(one, " ".join(self.address(worker.name) for worker in named))
        else:
            worker = self.workers[name]
            address = {"prefill": PREFILL, "decode": DECODE}[worker.role]
            text = commands()[address].replace(f"{worker.role}-0", name)
            if worker.is_advertised:
                text = text.replace(f"--listen tcp://{address}:5601", advertised())
            text = text.replace(address, self.hosts.address(name))
        return text.replace("DIR", shlex.quote(str(TINY_MODEL)))

    @property
    def router_ip(self) -> str:
        return self.hosts.address(self._router_on)

    def address(self, worker: str) -> str:
        return f"tcp://{self.hosts.address(worker)}:5601#{worker}"

    def start(self, name: str) -> None:
        """As a user does in a shell on its host, in the directory with its keys."""
        host = self._router_on if name == "router-0" else name
        command = self.in_shell(host, f"exec {self.command(name).strip()}", **self._variables)
        with self.log_of(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def in_shell(self, host: str, text: str, **variables: str) -> list[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "TMPDIR": str(self.directory), **variables}
        place = shlex.quote(str(self.directory / host))
        return [*self.hosts.entering(host, own), "bash", "-c", f"cd {place}; {text}"]

    def log_of(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def log(self, name: str) -> str:
        return self.log_of(name).read_text(errors="replace")

    def ask(self, prompt: Sequence[int], max_tokens: int = 8) -> Future[Answer]:
        """By OpenAI's client, which is on the router's host."""
        return self.pool.submit(self._ask, list(prompt), max_tokens)

    def status(self) -> dict[str, Any]:
        """By id, what the router's /status says of each worker."""
        return self.pool.submit(self._status).result(20)

    def until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        def holds() -> bool:
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended: {self.log(name)[-2000:]}"
            return condition()

        wait_until(holds, timeout_s, what)

    def is_idle(self) -> bool:
        """Nothing is held for anybody, and nothing was lost."""
        return all(
            one["num_requests"] == cache["blocks_used"] == cache["blocks_quarantined"] == 0
            and cache["committed_bytes"] == cache["registered_bytes"] > 0
            for one in self.status().values()
            for cache in [one["cache"]]
        )

    def lanes(self) -> list[str]:
        """Of all pairs, as both ends say."""
        return [lane["lane"] for one in self.status().values() for lane in one["lanes"]]

    def check_logs(self) -> None:
        for name in self.processes:
            for wrong in ("Traceback", "conservation is broken", "Fatal Python error"):
                assert wrong not in self.log(name), self.log(name)[-3000:]

    def _ask(self, prompt: list[int], max_tokens: int) -> Answer:
        began_s = time.monotonic()
        try:
            made = self.client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0,
                extra_body={"kv_transfer_params": {"verify": True}, "return_token_ids": True},
            ).model_dump()  # fmt: skip
        except openai.APIError as error:
            return Answer(prompt, max_tokens, [], [], ("", ""), began_s, error=str(error))
        params = made["kv_transfer_params"]
        pair = params["prefill"], params["decode"]
        tokens = made["choices"][0]["token_ids"]
        return Answer(prompt, max_tokens, tokens, params["kv_digests"], pair, began_s)

    def _status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{self.router_ip}:{PORT}/status", timeout=10) as answer:
            return {one["id"]: one for one in json.loads(answer.read())["workers"]}

    def _is_ready(self) -> bool:
        try:
            workers = self.status()
        except urllib.error.URLError:
            return False
        roles = Counter(worker.role for worker in self.workers.values())
        num_met = sum(len(one["lanes"]) for one in workers.values())
        return num_met == 2 * roles["prefill"] * roles["decode"]

    def _lead_nowhere(self, name: str, index: int) -> None:
        """A second network, whose name comes first, at the same addresses on all hosts and in
        reach of none, as that of containers, and a third whose cable ends in no switch."""
        for device, address in (("a0", "172.17.0.1/16"), ("b0", f"192.168.9.{index}/24")):
            self.hosts.run(name, f"ip link add name {device} type veth peer name {device}-far")
            self.hosts.run(name, f"ip address add {address} dev {device}")
            self.hosts.run(name, f"ip link set {device}-far up")
            self.hosts.run(name, f"ip link set {device} up")

    def _make_keys(self) -> None:
        """By the README's command; then each host gets its own and the public ones."""
        wanted = [*self.workers, "router-0"]
        text = commands()["anywhere 0"].replace("prefill-0 decode-0 router-0", " ".join(wanted))
        text = text.replace("keys/*-0/*-0.pub", "keys/*-*/*-*.pub")
        first = next(iter(self._hosts))
        (self.directory / first).mkdir()
        done = subprocess.run(
            self.in_shell(first, text), capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, ""), done
        made = (self.directory / first / "keys").rename(self.directory / "all-keys")
        for host in self._hosts:
            own = self.directory / host / "keys"
            own.mkdir(mode=0o700, parents=True)
            names = [host] if host in self.workers else []
            names += ["router-0"] if host == self._router_on else []
            for name in ["allowed", *names]:
                shutil.copytree(made / name, own / name)

    def _end(self) -> None:
        """By Ctrl-C, as a user does."""
        for process in self.processes.values():
            process.send_signal(signal.SIGINT)  # nothing where it has ended
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                process.kill()
                process.wait(10)
