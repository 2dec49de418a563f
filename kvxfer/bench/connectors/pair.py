"""The two ends of `kvxfer bench connectors`, as who measures sees them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from kvxfer.bench.connectors.moves import Aim, Timed
from kvxfer.bench.connectors.serve import serve_process
from kvxfer.bench.connectors.sweep import Setting
from kvxfer.bench.transfer_pair import (
    ANSWER_TIMEOUT_S,
    ROLES,
    Pair,
    Process,
    initiator,
    spawn_end,
)
from kvxfer.bench.transfer_shapes import Shape
from kvxfer.bench.transfer_words import OTHER, CacheSetup
from kvxfer.errors import DeadlineExceeded, TransferError, WorkerDied
from kvxfer.transfer.connector import Direction

LOOPBACK = "127.0.0.1"
ONE_PIECE = 1 << 40
"""Chunks of memory that is one plain allocation are as large as they can be."""


def start_process(
    ours: Connection, theirs: Connection, role: str, device: str, environment: Mapping[str, str]
) -> Process:
    return spawn_end(serve_process, theirs, role, device, environment)


class ConnectorsPair(Pair):
    """A source and a target; a context, as Pair. One connector and setting at a time."""

    start = staticmethod(start_process)
    target_host = LOOPBACK
    """Where the target can be reached by TCP."""

    @classmethod
    def between(cls, devices: tuple[str, str], environment: Mapping[str, str]) -> ConnectorsPair:
        """Two processes of this machine."""
        return cls(*devices, environment)

    def __enter__(self) -> ConnectorsPair:
        super().__enter__()
        return self

    def hear(self, role: str, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """As Pair's, and WorkerDied as soon as either process is gone."""
        pipe, deadline_s = self._pipes[role], time.monotonic() + timeout_s
        try:
            while not pipe.poll(0.2):
                self.check_alive()
                if time.monotonic() > deadline_s:
                    raise DeadlineExceeded(f"the {role} said nothing for {timeout_s:g} s")
            is_error, value = pipe.recv()
        except (EOFError, OSError):
            raise self._died(role) from None
        if is_error:
            raise TransferError(f"{role}: {value}")
        return value

    def check_alive(self) -> None:
        """Raise WorkerDied unless both processes live."""
        for role, process in self._processes.items():
            if not process.is_alive():
                raise self._died(role)

    def open_setting(self, setting: Setting, module: str) -> None:
        """Caches and a connector; what was open before is closed."""
        self.close()
        is_fixed, chunk_bytes = not setting.chunk_bytes, setting.chunk_bytes or ONE_PIECE
        shapes = (setting.shapes.source, setting.shapes.target)
        for role, shape in zip(ROLES, shapes, strict=True):
            setup = _setup(shape, setting.capacity, is_fixed)
            self.tell(role, ("open_chunked", (setup, chunk_bytes)))
        for role in ROLES:
            self.hear(role)
        self.reconnect(module, {})

    def aim(self, aim: Aim) -> None:
        self.both("aim", aim)

    def move(self, direction: Direction) -> Timed:
        """What was aimed at, once; the other end serves meanwhile."""
        role = initiator(direction)
        self.ask(OTHER[role], "serve", True)
        timed: Timed = self.ask(role, "timed")
        self.ask(OTHER[role], "serve", False)
        return timed

    def stream(self, size_bytes: int) -> float:
        """Seconds of a plain TCP stream from the source to the target."""
        host = self.target_host
        if self._stream_port == 0:
            self._stream_port = self.ask("target", "stream_open", host)
        seconds: float = self.ask("source", "stream_send", host, self._stream_port, size_bytes)
        return seconds

    def close(self) -> None:
        self._stream_port = 0
        super().close()

    _stream_port = 0

    def _died(self, role: str) -> WorkerDied:
        died = super()._died(role)
        why = getattr(self._processes[role], "why", "")
        return WorkerDied(why) if why else died


def _setup(shape: Shape, capacity: int, is_fixed: bool) -> CacheSetup:
    return CacheSetup.of(shape, capacity=capacity, fixed=is_fixed)
