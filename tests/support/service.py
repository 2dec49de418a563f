"""A prefill worker, a decode worker and a router as processes of their own, and the checks that
must hold of them whatever is done to them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import select
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from support.fork_server import ForkServer
from support.null_process import SPEC
from support.null_runner import VOCAB_SIZE, Reference

from kvxfer.serve.router import Router

ROLES = ("prefill", "decode", "router")
PEER_TIMEOUT_S = 1.0
REQUEST_TIMEOUT_S = 4.0
"""Of hand-over, grant and lease; what holds them has ended after it."""
END_TIMEOUT_S = REQUEST_TIMEOUT_S + 4 * PEER_TIMEOUT_S
"""The longest that a request may take to its end, whatever happens."""
RECOVERY_TIMEOUT_S = 20.0
"""On a machine that is busy with other things peers seem silent now and then, and meet again."""
START_TIMEOUT_S = 10.0
SOCKETS_KEPT_BY_UCX = {"-0 is lost: ": 2, "cache: Sleep: ": 2, "cache: Shrink: ": 2}
"""By what the log tells. UCX keeps a socket at either end, or two, each time that two living agents
lose and meet each other, and each time that an agent follows another after a revocation: measured,
one by shared memory and two by TCP, nixl 1.5.1; the connector `peer` keeps none, and a peer that
died leaves none. Losses are to be 0 once a lost peer's agent is dropped with ours (incarnations).
"""
_ports = itertools.count(20_000 + os.getpid() % 400 * 20)
_ports_lock = threading.Lock()


def free_port() -> int:
    """One that no ephemeral port is, so that nobody takes it while its owner is being restarted."""
    with _ports_lock:
        for port in _ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with contextlib.suppress(OSError):
                    probe.bind(("127.0.0.1", port))
                    return port
    raise AssertionError("no port is free")


def until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.01)


@dataclass
class Asked:
    """A request, what it should come to, and how it ended ('' while it has not)."""

    name: str
    tokens: list[int]
    max_new_tokens: int
    reference: Reference
    reason: str = ""
    error: str = ""
    output: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    @property
    def is_served(self) -> bool:
        return self.reason == "length"

    def check(self) -> None:
        """No wrong token, ever; all of them, and the right KV, where it says that it is whole."""
        assert self.output == self.reference.tokens[: len(self.output)], self
        if self.is_served:
            assert self.output == self.reference.tokens, self
            assert self.digests == self.reference.digests, self
        elif self.reason in ("error", "lost"):
            assert self.error, f"no reason is given: {self}"
        else:
            assert self.reason == "cancelled", self


class Process:
    """One of the three, which may be started again at the same address."""

    def __init__(self, server: ForkServer, order: dict[str, Any], log: Path) -> None:
        self._server = server
        self.order = order
        self.log = log
        self.pid_path = log.with_suffix(".pid")
        self.role: str = order["role"]
        self.pid = 0
        self.starts = 0

    def start(self) -> None:
        """Returns once it is ready."""
        self.launch()
        self._wait_ready(time.monotonic() + START_TIMEOUT_S)
        self.took_s = time.monotonic() - self.began_s

    def launch(self) -> None:
        """As `start`, but at once."""
        assert not self.pid
        self.began_s = time.monotonic()
        self._told, theirs = os.pipe()
        try:
            self._fork(theirs)
        finally:
            os.close(theirs)

    def _fork(self, told: int) -> None:
        log = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            self.pid = self._server.fork(self.order, log, told)
        finally:
            os.close(log)
        draft = self.pid_path.with_suffix(".draft")
        draft.write_text(str(self.pid))
        draft.rename(self.pid_path)
        self.starts += 1

    def _wait_ready(self, deadline_s: float) -> None:
        text = b""
        while b'"ready"' not in text:
            left = deadline_s - time.monotonic()
            is_told = left > 0 and select.select([self._told], [], [], left)[0]
            more = os.read(self._told, 4096) if is_told else b""
            assert more, f"{self.role} did not start: {text!r}\n{self.tail()}"
            text += more

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 5.0) -> int:
        code = self._server.wait(self.pid, timeout_s)
        self.pid = 0
        self._close()
        return code

    def _close(self) -> None:
        os.close(self._told)

    def end(self) -> None:
        """However it is."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def is_alive(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE)
        return False

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def used(self) -> dict[str, int]:
        """What it may leak: descriptors (sockets and memory among them) and threads."""
        process = psutil.Process(self.pid)
        return {"descriptors": process.num_fds(), "threads": process.num_threads()}

    def open_files(self) -> list[str]:
        found = []
        for one in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(f"{one.name} {one.readlink()}")
        return found


class RouterProcess(Process):
    """Started at once, and met by workers when they are there; told and asked over a socket."""

    def start(self) -> None:
        self.launch()

    def launch(self) -> None:
        assert not self.pid
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._fork(theirs.fileno())
        theirs.close()

    def _close(self) -> None:
        self.socket.close()


class Service:
    """All three, at addresses that stay. A context. One thread."""

    def __init__(
        self,
        server: ForkServer,
        *,
        lane: str = "push",
        connector: str = "nixl",
        environment: dict[str, str] | None = None,
        via: Callable[[str], str] = lambda address: address,
        namespaces: Mapping[str, Mapping[str, str]] | None = None,
        name: str = "",
        **options: Any,
    ) -> None:
        """`via` makes of a worker's address the one that others dial. Workers in `namespaces`, by
        role, listen on Unix sockets, which are reached from all."""
        self.name = name or f"{lane}-{connector}"
        self._directory = tempfile.TemporaryDirectory(prefix="kvxfer-faults-")
        self.directory = Path(self._directory.name)
        self._names = itertools.count(1)
        self._random = random.Random(self.name)
        self.asked: dict[str, Asked] = {}
        self.addresses = {role: f"tcp://127.0.0.1:{free_port()}" for role in ("prefill", "decode")}
        for role in namespaces or ():
            self.addresses[role] = f"ipc://{self.directory}/{role}.socket"
        common = {
            "connector": connector,
            "lane": lane,
            "peer_timeout_s": PEER_TIMEOUT_S,
            "request_timeout_s": REQUEST_TIMEOUT_S,
            **options,
        }
        dialled = {role: via(address) for role, address in self.addresses.items()}
        self.processes: dict[str, Process] = {}
        for role in ROLES:
            order: dict[str, Any] = {"role": role, "environment": environment or {}}
            order["namespaces"] = dict((namespaces or {}).get(role, {}))
            if role == "router":
                order |= {
                    "dial": [dialled["decode"]],
                    "peer_timeout_s": PEER_TIMEOUT_S,
                    "patience_s": REQUEST_TIMEOUT_S + 2 * PEER_TIMEOUT_S,
                }
            else:
                own = {"worker_id": f"{role}-0", "listen": self.addresses[role]}
                dial = [dialled["prefill"]] if role == "decode" else []
                hooks = str(self.order_path(role))
                order |= {"options": {**common, **own}, "dial": dial, "hooks": hooks}
            kind = RouterProcess if role == "router" else Process
            self.processes[role] = kind(server, order, self.directory / f"{role}.log")
        self._router: RouterProcess = self.processes["router"]  # type: ignore[assignment]
        self._baselines: dict[tuple[str, int], dict[str, int]] = {}
        self._kept = SOCKETS_KEPT_BY_UCX if "nixl" in connector else {}
        self._imports = "peer" in connector

    def __enter__(self) -> Service:
        try:
            for process in self.processes.values():
                process.start()
            self.recover()
            self.check_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.end()
        self._directory.cleanup()

    def __getitem__(self, role: str) -> Process:
        return self.processes[role]

    def order_path(self, role: str) -> Path:
        return self.directory / f"{role}.order"

    def has_fired(self, role: str) -> bool:
        return self.order_path(role).with_suffix(".fired").exists()

    def finish(self, role: str, number: signal.Signals) -> int:
        """End one by a signal, and see that it ends; its exit code."""
        if role == "router":
            self.listen(0.0)
        with contextlib.suppress(ProcessLookupError):
            self[role].send(number)
        code = self[role].wait()
        if role == "router":
            self._router_gone()
        return code

    # --- requests -----------------------------------------------------------------------------

    def ask(self, num_tokens: int = 20, max_new_tokens: int = 5) -> Asked:
        name = str(next(self._names))
        tokens = [self._random.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
        reference = Reference([SPEC], tokens, max_new_tokens)
        self.asked[name] = Asked(name, tokens, max_new_tokens, reference)
        self._tell(do="submit", id=name, tokens=tokens, max_new_tokens=max_new_tokens)
        return self.asked[name]

    def cancel(self, asked: Asked) -> None:
        self._tell(do="cancel", id=asked.name)

    def _tell(self, **order: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionError):  # it was killed
            self._router.socket.send(json.dumps(order).encode())

    def listen(self, timeout_s: float) -> None:
        """Take in what the router tells."""
        end = time.monotonic() + timeout_s
        while True:
            left = max(0.0, end - time.monotonic())
            if not select.select([self._router.socket], [], [], left)[0]:
                return
            try:
                data = self._router.socket.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                self._router_gone()
                time.sleep(left)
                return
            told = json.loads(data)
            asked = self.asked.get(told.pop("id"))
            if asked is not None and not asked.reason:
                for name, value in told.items():
                    setattr(asked, name, value)

    def _router_gone(self) -> None:
        for asked in self.asked.values():
            if not asked.reason:
                asked.reason, asked.error = "lost", "its router died"

    def collect(self, timeout_s: float = END_TIMEOUT_S) -> list[Asked]:
        """All that were asked for, once each has ended as it may."""
        deadline = time.monotonic() + timeout_s
        while open_ones := [one for one in self.asked.values() if not one.reason]:
            assert time.monotonic() < deadline, f"hangs: {open_ones}\n{self.tails()}"
            self.listen(0.02)
        found, self.asked = list(self.asked.values()), {}
        for asked in found:
            asked.check()
        return found

    def recover(self, timeout_s: float = RECOVERY_TIMEOUT_S) -> float:
        """Seconds until a new request is served, in full and right."""
        began = time.monotonic()
        while True:
            asked = self.ask(12, 2)
            (*_, asked) = self.collect(timeout_s)
            if asked.is_served:
                return time.monotonic() - began
            waited = time.monotonic() - began
            assert waited < timeout_s, f"no recovery: {asked.reason} {asked.error}\n{self.tails()}"
            time.sleep(0.05)

    # --- what must hold -----------------------------------------------------------------------

    def status(self, role: str) -> dict[str, Any]:
        router = Router(peer_timeout_s=5.0)
        try:
            (backend,) = router.connect([self.addresses[role]], 5.0)
            return dict(router.status(backend).values)
        finally:
            router.close()

    def check_idle(self) -> None:
        """Blocks are conserved and nobody's; descriptors and threads are what they were."""
        regions = {role: self._check_blocks(role) for role in ("prefill", "decode")}
        for process in self.processes.values():
            self._check_used(process, regions)
            text = process.log.read_text(errors="replace") if process.log.exists() else ""
            for wrong in ("conservation is broken", "Traceback", "Fatal Python error"):
                assert wrong not in text, f"{self.name}, {process.role}:\n{text[-6000:]}"

    def _check_blocks(self, role: str) -> int:
        """How many regions it has."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while True:
            values = self.status(role)
            held = {name: values[f"blocks_{name}"] for name in ("used", "quarantined")}
            is_idle = not any(held.values()) and not values.get("jobs", values.get("requests"))
            if is_idle:
                break
            assert time.monotonic() < deadline, f"{role} leaks: {held} {values}\n{self.tails()}"
            time.sleep(0.02)
        null = 1
        free = values["blocks_free"] + values["prefix_cache_blocks"] + null
        assert free == values["blocks_total"], f"{role}: {values}"
        assert values["registered_bytes"] == values["committed_bytes"], f"{role}: {values}"
        return int(values["regions"])

    def _check_used(self, process: Process, regions: Mapping[str, int]) -> None:
        """Against the first look at this process: it has met its peers and served by then."""
        key, used = (process.role, process.pid), process.used()
        expected = self._num_kept() + self._num_memory_files(process.role, regions)
        before = self._baselines.setdefault(key, {**used, "expected": expected})
        allowed = dict(before)
        allowed["descriptors"] += expected - before["expected"]

        def is_flat() -> bool:
            nonlocal used
            used = process.used()
            return all(used[name] <= allowed[name] for name in used)

        with contextlib.suppress(AssertionError):
            until(is_flat, 3 * PEER_TIMEOUT_S, "")
        assert is_flat(), (
            f"{self.name}: {process.role} leaks: {before} became {used}, {allowed} allowed; open:"
            f" {process.open_files()}\n{self.tails()}"
        )

    def _num_memory_files(self, role: str, regions: Mapping[str, int]) -> int:
        """A chunk of host memory is a file, open in its owner and in who maps it to pull."""
        imported = regions["prefill"] if self._imports and role == "decode" else 0
        return regions.get(role, 0) + imported

    def _num_kept(self) -> int:
        """By UCX, as far as the workers' own words tell."""
        logs = [self[role].log.read_text(errors="replace") for role in ("prefill", "decode")]
        return sum(log.count(word) * n for log in logs for word, n in self._kept.items())

    def tails(self) -> str:
        return "\n".join(f"--- {p.role}\n{p.tail()}" for p in self.processes.values())


def check_ended(found: Sequence[Asked]) -> dict[str, int]:
    """How they ended, counted."""
    counts: dict[str, int] = {}
    for asked in found:
        counts[asked.reason] = counts.get(asked.reason, 0) + 1
    return counts
