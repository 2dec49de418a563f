"""Two processes with a cache and a connector each, as the bench that started them sees them."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol

from kvxfer.bench.isolated import LAST_WORDS_S
from kvxfer.bench.transfer_words import CacheSetup, Contact, Move, Planned
from kvxfer.errors import DeadlineExceeded, TransferError, WorkerDied
from kvxfer.transfer.connector import Direction

ANSWER_TIMEOUT_S = 120.0
ROLES = ("source", "target")


class Process(Protocol):
    """What of multiprocessing's processes is used."""

    @property
    def exitcode(self) -> int | None: ...
    @property
    def pid(self) -> int | None: ...
    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...
    def kill(self) -> None: ...


Start = Callable[[Connection, Connection, str, str, Mapping[str, str]], Process]


def start_process(
    ours: Connection, theirs: Connection, role: str, device: str, environment: Mapping[str, str]
) -> Process:
    from kvxfer.bench.transfer_serve import serve_process

    return spawn_end(serve_process, theirs, role, device, environment)


def spawn_end(
    main: Callable[[Connection, str, str, Mapping[str, str]], None],
    theirs: Connection,
    role: str,
    device: str,
    environment: Mapping[str, str],
) -> Process:
    """A process that runs `main` with `theirs`, its end of a pipe, which is closed here."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=main, args=(theirs, role, device, environment))
    # Ctrl-C is ours to handle, from the process's first moment on: it inherits the mask, which
    # the start of multiprocessing's own helper would lift.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process


class Pair:
    """A source and a target. `with` ends both, whatever they were doing."""

    start: Start = staticmethod(start_process)
    """How an end is started."""

    def __init__(
        self, source: str, target: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """`source` and `target` are devices, `environment` what to add to that of both."""
        self.devices = {"source": source, "target": target}
        self.directions: frozenset[Direction] = frozenset()
        """Of the connector that is open."""
        self.setup = CacheSetup((), (), ())
        """Of the source's cache that is open."""
        self._environment = dict(environment or {})
        self._pipes: dict[str, Connection] = {}
        self._processes: dict[str, Process] = {}

    def __enter__(self) -> Pair:
        try:
            for role in ROLES:
                ours, theirs = multiprocessing.get_context("spawn").Pipe()
                self._pipes[role] = ours
                self._processes[role] = self.start(
                    ours, theirs, role, self.devices[role], self._environment
                )
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def tell(self, role: str, message: object) -> None:
        try:
            self._pipes[role].send(message)
        except OSError:
            raise self._died(role) from None

    def hear(self, role: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """The next answer. Raises TransferError with the other's error, WorkerDied,
        DeadlineExceeded."""
        pipe, deadline_s = self._pipes[role], time.monotonic() + timeout_s
        try:
            while not pipe.poll(0.2):
                if time.monotonic() > deadline_s:
                    raise DeadlineExceeded(f"the {role} said nothing for {timeout_s:g} s")
            is_error, value = pipe.recv()
        except (EOFError, OSError):
            raise self._died(role) from None
        if is_error:
            raise TransferError(f"{role}: {value}")
        return value

    def ask(self, role: str, verb: str, *arguments: object) -> Any:
        self.tell(role, (verb, arguments))
        return self.hear(role)

    def both(self, verb: str, *arguments: object) -> dict[str, Any]:
        """Ask both at once."""
        for role in ROLES:
            self.tell(role, (verb, arguments))
        return {role: self.hear(role) for role in ROLES}

    def open(
        self,
        connector: str,
        source: CacheSetup,
        target: CacheSetup | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Caches as told (the target's is like the source's by default), connected."""
        self.close()
        self.tell("source", ("open_cache", (source,)))
        self.tell("target", ("open_cache", (target or source,)))
        for role in ROLES:
            self.hear(role)
        self.setup = source
        self.reconnect(connector, environment or {})

    def reconnect(self, connector: str, environment: Mapping[str, str]) -> None:
        """Another connector, or another life of the same, over the caches that are open."""
        self._leave()
        contacts: dict[str, Contact] = self.both("open_connector", connector, dict(environment))
        self.directions = contacts["source"].directions
        for role, other in zip(ROLES, reversed(ROLES), strict=True):
            self.tell(role, ("connect", (contacts[other],)))
        for role in ROLES:
            self.hear(role)

    def close(self) -> None:
        """Give back connectors and caches; the processes wait for more."""
        self._leave()
        self.both("close")

    def process_id(self, role: str) -> int | None:
        return self._processes[role].pid

    def plan(self, move: Move, with_runs: bool) -> Planned:
        planned: Planned = self.ask(initiator(move.direction), "plan", move, with_runs)
        return planned

    def run(self, direction: Direction) -> float:
        """Seconds that what was planned took; the other end serves meanwhile."""
        role = initiator(direction)
        other = ROLES[role == "source"]
        self.ask(other, "serve", True)
        seconds: float = self.ask(role, "run")
        self.ask(other, "serve", False)
        return seconds

    def gauge(self, direction: Direction, size_bytes: int) -> float:
        """Seconds of the machine's own copy of as much, in the process that starts transfers."""
        devices = (self.devices["source"], self.devices["target"])
        seconds: float = self.ask(initiator(direction), "gauge", *devices, size_bytes)
        return seconds

    def _leave(self) -> None:
        """The end that reads from the other lets go of it first."""
        for role in reversed(ROLES):
            self.ask(role, "disconnect")
        for role in reversed(ROLES):
            self.ask(role, "close_connector")

    def _died(self, role: str) -> WorkerDied:
        process = self._processes[role]
        process.join(LAST_WORDS_S)
        return WorkerDied(f"the {role}'s process ended with code {process.exitcode}")

    def _end(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        for process in self._processes.values():
            process.join(LAST_WORDS_S)
            if process.is_alive():
                process.kill()
                process.join(LAST_WORDS_S)


def initiator(direction: Direction) -> str:
    """Who starts a transfer: the source pushes, the target pulls."""
    return "source" if direction is Direction.PUSH else "target"
