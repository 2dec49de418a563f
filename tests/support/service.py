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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from support.fork_server import ForkServer
from support.null_process import SPEC
from support.null_runner import VOCAB_SIZE, Reference
from support.violations import Crash, Hang, Leak, NoRecovery, WrongToken

from kvxfer.control.cache_messages import CacheState, Shrink, Sleep, WakeUp
from kvxfer.serve.completion import Backend
from kvxfer.serve.router import Router
from kvxfer.transfer.regions import Region

WORKERS = ("prefill", "decode")
ROLES = (*WORKERS, "router")
PEER_TIMEOUT_S = 1.0
REQUEST_TIMEOUT_S = 4.0
"""Of hand-over, grant and lease; what holds them has ended after it."""
END_TIMEOUT_S = REQUEST_TIMEOUT_S + 4 * PEER_TIMEOUT_S
"""The longest that a request may take to its end, whatever happens."""
RECOVERY_TIMEOUT_S = 20.0
"""On a machine that is busy with other things peers seem silent now and then, and meet again."""
START_TIMEOUT_S = 10.0
WRONG_LINES = {"conservation is broken": Leak, "Traceback": Crash, "Fatal Python error": Crash}
"""In the log of a worker or a router."""
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
    router: str = "router"
    asked_s: float = field(default_factory=time.monotonic)
    took_s: float = 0.0

    @property
    def is_served(self) -> bool:
        return self.reason == "length"

    def check(self) -> None:
        """No wrong token, ever; all of them, and the right KV, where it says that it is whole."""
        if self.output != self.reference.tokens[: len(self.output)]:
            raise WrongToken(str(self))
        if self.is_served:
            whole = self.reference.tokens, self.reference.digests
            if (self.output, self.digests) != whole:
                raise WrongToken(f"{self} is not whole")
        elif self.reason in ("error", "lost", "overloaded"):
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

    def is_stopped(self) -> bool:
        return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)

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


def role_of(name: str) -> str:
    return name.partition("-")[0]


def num_failed(process: Process) -> int:
    """How often it did not reach a peer, by its own word. UCX keeps a socket of each time for as
    long as the agent lives; after a few the worker takes another (`worker.residency`)."""
    log = process.log.read_text(errors="replace") if process.log.exists() else ""
    return log.count("nixlBackendError: NIXL_ERR_BACKEND")


def named(role: str, index: int) -> str:
    """What the processes of a service are called: the first one by its role alone."""
    return f"{role}-{index}" if index else role


class Service:
    """All three, at addresses that stay. A context. One thread.

    There may be more workers, called prefill-1 and so on; each decode worker has a router."""

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
        workers: tuple[int, int] = (1, 1),
        also_dial: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """`via` makes of a worker's address the one that others dial. Workers in `namespaces`, by
        role, listen on Unix sockets, which are reached from all. `workers`: how many there are for
        prefill and for decode; the latter dial `also_dial`, too."""
        self.name = name or f"{lane}-{connector}"
        self._directory = tempfile.TemporaryDirectory(prefix="kvxfer-faults-")
        self.directory = Path(self._directory.name)
        self._names = itertools.count(1)
        self._random = random.Random(self.name)
        self.asked: dict[str, Asked] = {}
        self.workers = [
            named(role, index)
            for role, number in zip(WORKERS, workers, strict=True)
            for index in range(number)
        ]
        self.addresses = {one: f"tcp://127.0.0.1:{free_port()}" for one in self.workers}
        for role in namespaces or ():
            self.addresses[role] = f"ipc://{self.directory}/{role}.socket"
        common = {
            "connector": connector,
            "lane": lane,
            "peer_timeout_s": PEER_TIMEOUT_S,
            "request_timeout_s": REQUEST_TIMEOUT_S,
            **options,
        }
        dialled = {one: via(address) for one, address in self.addresses.items()}
        prefill = [dialled[one] for one in self.workers if role_of(one) == "prefill"]
        orders: dict[str, dict[str, Any]] = {}
        for one in self.workers:
            role, index = role_of(one), one.partition("-")[2] or "0"
            orders[one] = {
                "role": role,
                "namespaces": dict((namespaces or {}).get(role, {})),
                "options": common | {"worker_id": f"{role}-{index}", "listen": self.addresses[one]},
                "dial": [*prefill, *also_dial] if role == "decode" else [],
                "hooks": str(self.order_path(one)),
            }
            if role == "decode":
                orders[named("router", int(index))] = {
                    "role": "router",
                    "namespaces": {},
                    "dial": [dialled[one]],
                    "peer_timeout_s": PEER_TIMEOUT_S,
                    "patience_s": REQUEST_TIMEOUT_S + 2 * PEER_TIMEOUT_S,
                }
        self.processes: dict[str, Process] = {}
        for one in sorted(orders, key=lambda name: ROLES.index(role_of(name))):
            kind = RouterProcess if role_of(one) == "router" else Process
            order = {"environment": environment or {}, **orders[one]}
            self.processes[one] = kind(server, order, self.directory / f"{one}.log")
        self._routers: dict[str, RouterProcess] = {
            name: one for name, one in self.processes.items() if isinstance(one, RouterProcess)
        }
        self._baselines: dict[tuple[str, int], dict[str, int]] = {}
        self._imports = "peer" in connector

    def __enter__(self) -> Service:
        try:
            for process in self.processes.values():
                process.start()
            self._meet()
            self.check_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _meet(self) -> None:
        """Every pair of workers has served, so that all that lives long is there."""
        for router in self._routers:
            self.recover(router=router)
        prefill = [one for one in self.workers if role_of(one) == "prefill"]
        if len(prefill) > 1:
            for worker in prefill:
                wanted = len(self.workers) - len(prefill)
                until(lambda w=worker, n=wanted: self.status(w)["peers"] == n, 5.0, "all have met")
            for router in self._routers:
                for _ in range(2 * len(prefill)):
                    self.ask(router=router)
            self.collect()

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.end()
        self._directory.cleanup()

    def __getitem__(self, role: str) -> Process:
        return self.processes[role]

    @property
    def routers(self) -> list[str]:
        return list(self._routers)

    def order_path(self, role: str) -> Path:
        return self.directory / f"{role}.order"

    def has_fired(self, role: str) -> bool:
        return self.order_path(role).with_suffix(".fired").exists()

    def finish(self, role: str, number: signal.Signals) -> int:
        """End one by a signal, and see that it ends; its exit code."""
        if role_of(role) == "router":
            self.listen(0.0)
        with contextlib.suppress(ProcessLookupError):
            self[role].send(number)
        code = self[role].wait()
        if role_of(role) == "router":
            self._router_gone(role)
        return code

    # --- requests -----------------------------------------------------------------------------

    def ask(self, num_tokens: int = 20, max_new_tokens: int = 5, router: str = "router") -> Asked:
        name = str(next(self._names))
        tokens = [self._random.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
        reference = Reference([SPEC], tokens, max_new_tokens)
        self.asked[name] = Asked(name, tokens, max_new_tokens, reference, router=router)
        self._tell(router, do="submit", id=name, tokens=tokens, max_new_tokens=max_new_tokens)
        return self.asked[name]

    def cancel(self, asked: Asked) -> None:
        self._tell(asked.router, do="cancel", id=asked.name)

    def _tell(self, router: str, **order: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionError):  # it was killed
            self._routers[router].socket.send(json.dumps(order).encode())

    def listen(self, timeout_s: float) -> None:
        """Take in what the routers tell."""
        end = time.monotonic() + timeout_s
        while True:
            left = max(0.0, end - time.monotonic())
            sockets = {one.socket: name for name, one in self._routers.items()}
            readable = select.select(list(sockets), [], [], left)[0]
            if not readable:
                return
            for one in readable:
                if not self._hear(one, sockets[one]):
                    time.sleep(left)
                    return

    def _hear(self, source: socket.socket, router: str) -> bool:
        """Whether there still is that router."""
        try:
            data = source.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self._router_gone(router)
            return False
        told = json.loads(data)
        asked = self.asked.get(told.pop("id"))
        if asked is not None and not asked.reason:
            asked.took_s = time.monotonic() - asked.asked_s
            for name, value in told.items():
                setattr(asked, name, value)
        return True

    def _router_gone(self, router: str) -> None:
        for asked in self.asked.values():
            if not asked.reason and asked.router == router:
                asked.reason, asked.error = "lost", "its router died"

    def collect(self, timeout_s: float = END_TIMEOUT_S) -> list[Asked]:
        """All that were asked for, once each has ended as it may."""
        deadline = time.monotonic() + timeout_s
        while open_ones := [one for one in self.asked.values() if not one.reason]:
            if time.monotonic() > deadline:
                raise Hang(f"hangs: {open_ones}\n{self.tails()}")
            self.listen(0.02)
        found, self.asked = list(self.asked.values()), {}
        for asked in found:
            asked.check()
        return found

    def recover(self, timeout_s: float = RECOVERY_TIMEOUT_S, router: str = "router") -> float:
        """Seconds until a new request is served, in full and right."""
        began = time.monotonic()
        while True:
            asked = self.ask(12, 2, router)
            (*_, asked) = self.collect(timeout_s)
            if asked.is_served:
                return time.monotonic() - began
            waited = time.monotonic() - began
            if waited > timeout_s:
                told = f"{asked.reason} {asked.error}\n{self.tails()}"
                raise NoRecovery(f"no recovery: {told}")
            time.sleep(0.05)

    # --- what must hold -----------------------------------------------------------------------

    @contextlib.contextmanager
    def _reached(self, role: str) -> Iterator[tuple[Router, Backend]]:
        router = Router(peer_timeout_s=5.0)
        try:
            (backend,) = router.connect([self.addresses[role]], 5.0)
            yield router, backend
        finally:
            router.close()

    def status(self, role: str) -> dict[str, Any]:
        with self._reached(role) as (router, backend):
            return dict(router.status(backend).values)

    def manage(
        self, role: str, request: Shrink | Sleep | WakeUp, timeout_s: float = 10.0
    ) -> CacheState:
        """What became of a worker's cache."""
        with self._reached(role) as (router, backend):
            return router.manage(backend, request, timeout_s)

    def regions(self, role: str) -> list[Region]:
        """What a worker has registered now."""
        with self._reached(role) as (_, backend):
            assert backend.facts is not None
            return list(backend.facts.regions)

    def check_idle(self) -> None:
        """Blocks are conserved and nobody's; descriptors and threads are what they were."""
        regions = {worker: self._check_blocks(worker) for worker in self.workers}
        for process in self.processes.values():
            self._check_used(process, regions)
            text = process.log.read_text(errors="replace") if process.log.exists() else ""
            for wrong, kind in WRONG_LINES.items():
                if wrong in text:
                    raise kind(f"{self.name}, {process.role}:\n{text[-6000:]}")

    def _check_blocks(self, role: str) -> int:
        """How many regions it has."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while True:
            values = self.status(role)
            held = {name: values[f"blocks_{name}"] for name in ("used", "quarantined")}
            is_idle = not any(held.values()) and not values.get("jobs", values.get("requests"))
            if is_idle:
                break
            if time.monotonic() > deadline:
                raise Leak(f"{role} leaks: {held} {values}\n{self.tails()}")
            time.sleep(0.02)
        null = 1
        free = values["blocks_free"] + values["prefix_cache_blocks"] + null
        is_conserved = free == values["blocks_total"]
        if not is_conserved or values["registered_bytes"] != values["committed_bytes"]:
            raise Leak(f"{role}: {values}")
        return int(values["regions"])

    def _check_used(self, process: Process, regions: Mapping[str, int]) -> None:
        """Against the first look at this process: it has met its peers and served by then."""
        key, used = (process.log.stem, process.pid), process.used()
        expected = self._num_memory_files(process.log.stem, regions) + num_failed(process)
        before = self._baselines.setdefault(key, {**used, "expected": expected})
        allowed = dict(before)
        allowed["descriptors"] += expected - before["expected"]

        def is_flat() -> bool:
            nonlocal used
            used = process.used()
            return all(used[name] <= allowed[name] for name in used)

        with contextlib.suppress(AssertionError):
            until(is_flat, 3 * PEER_TIMEOUT_S, "")
        if not is_flat():
            raise Leak(
                f"{self.name}: {process.role} leaks: {before} became {used}, {allowed} allowed;"
                f" open: {process.open_files()}\n{self.tails()}"
            )

    def _num_memory_files(self, worker: str, regions: Mapping[str, int]) -> int:
        """A chunk of host memory is a file, open in its owner and in who maps it to pull."""
        imported = 0
        if self._imports and role_of(worker) == "decode":
            imported = sum(count for one, count in regions.items() if role_of(one) == "prefill")
        return regions.get(worker, 0) + imported

    def tails(self) -> str:
        return "\n".join(f"--- {name}\n{p.tail()}" for name, p in self.processes.items())


def check_ended(found: Sequence[Asked]) -> dict[str, int]:
    """How they ended, counted."""
    counts: dict[str, int] = {}
    for asked in found:
        counts[asked.reason] = counts.get(asked.reason, 0) + 1
    return counts
