"""A prefill worker, a decode worker and a router as processes of their own, and the checks that
must hold of them whatever is done to them."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.asked import Asked
from support.fork_server import ForkServer
from support.null_process import SPEC
from support.null_runner import VOCAB_SIZE, Reference
from support.service_processes import Process, RouterProcess, free_port, num_failed, until
from support.violations import Crash, Hang, Leak, MoreHeld, NoRecovery

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
WRONG_LINES = {"conservation is broken": Leak, "Traceback": Crash, "Fatal Python error": Crash}
"""In the log of a worker or a router."""


def role_of(name: str) -> str:
    return name.partition("-")[0]


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

    def ask(
        self,
        num_tokens: int = 20,
        max_new_tokens: int = 5,
        router: str = "router",
        num_common: int = 0,
    ) -> Asked:
        """A random prompt; its first `num_common` tokens are the same ones in all."""
        (asked,) = self.ask_together(1, num_tokens, max_new_tokens, router, num_common)
        return asked

    def ask_together(
        self,
        count: int,
        num_tokens: int,
        max_new_tokens: int,
        router: str = "router",
        num_common: int = 0,
    ) -> list[Asked]:
        """So many at once: what they should come to is known before."""
        made = []
        for _ in range(count):
            tokens = [self._random.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
            tokens[:num_common] = range(num_common)
            reference = Reference([SPEC], tokens, max_new_tokens)
            name = str(next(self._names))
            made.append(Asked(name, tokens, max_new_tokens, reference, router=router))
        for one in made:
            self.asked[one.name] = one
            order = {"tokens": one.tokens, "max_new_tokens": max_new_tokens}
            self._tell(router, do="submit", id=one.name, **order)
        return made

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

    @property
    def has_ended(self) -> bool:
        """Whether all that was asked for has an end."""
        return all(one.reason for one in self.asked.values())

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
        """Against the first look at this process: it has met its peers and served by then. And
        against what others in its place held at first, none of which had seen a fault of its own:
        two agents of UCX have a socket more or less between them, as who connects first."""
        key, used = (process.log.stem, process.pid), process.used()
        expected = self._num_memory_files(process.log.stem, regions) + num_failed(process)
        before = self._baselines.setdefault(key, {**used, "expected": expected})
        allowed = dict(before)
        firsts = (look for (name, _), look in self._baselines.items() if name == process.log.stem)
        most = max(look["descriptors"] - look["expected"] for look in firsts)
        allowed["descriptors"] = most + expected

        def is_flat() -> bool:
            nonlocal used
            used = process.used()
            return all(used[name] <= allowed[name] for name in used)

        try:  # once is enough: whoever asks it how it is opens a socket there for the while
            until(is_flat, 3 * PEER_TIMEOUT_S, "")
        except AssertionError:
            raise MoreHeld(
                f"{self.name}: {process.role} leaks: {before} became {used}, {allowed} allowed;"
                f" open: {process.open_files()}\n{self.tails()}"
            ) from None

    def _num_memory_files(self, worker: str, regions: Mapping[str, int]) -> int:
        """A chunk of host memory is a file, open in its owner and in who maps it to pull."""
        imported = 0
        if self._imports and role_of(worker) == "decode":
            imported = sum(count for one, count in regions.items() if role_of(one) == "prefill")
        return regions.get(worker, 0) + imported

    def tails(self) -> str:
        return "\n".join(f"--- {name}\n{p.tail()}" for name, p in self.processes.items())
