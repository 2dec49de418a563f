"""The two workers of one case of `kvxfer bench growth`, as the bench sees them."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from kvxfer.bench.growth_cases import ROLES, SPEC, Case
from kvxfer.errors import DeadlineExceeded, KvxferError, TransferError, WorkerDied
from kvxfer.launch.local import LocalLauncher, WorkerProcess

START_TIMEOUT_S = 200.0
ANSWER_TIMEOUT_S = 120.0
PEER_TIMEOUT_S = 30.0
"""Of silence: what is measured is no liveness, and the machine may be busy."""
LAST_WORDS_S = 10.0
LOOK_S = 0.2
"""Between looks whether the workers live, while one is to answer."""
MODULE = "kvxfer.bench.growth_worker"


class GrowthPair:
    """A context: started and acquainted within it, and surely ended after."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._undo = ExitStack()
        self._launcher: LocalLauncher
        self._told: dict[str, Connection] = {}
        self.base_blocks: dict[str, int] = {}
        """Usable by each before any growth."""

    def __enter__(self) -> GrowthPair:
        with ExitStack() as undo:
            scratch = undo.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-growth-"))
            door = undo.enter_context(socket.socket(socket.AF_UNIX))
            path = Path(scratch) / "bench"  # in a directory of mode 0700
            door.bind(str(path))
            door.listen(len(ROLES))
            door.setblocking(False)
            self._launcher = undo.enter_context(LocalLauncher(Path(scratch), _ignore))
            undo.callback(self._hang_up)
            source = self._start("source", path, "")
            self._launcher.wait_for(
                lambda: bool(source.address), START_TIMEOUT_S, "the source's address"
            )
            self._start("target", path, source.address)
            self._launcher.wait_for(
                lambda: self._admit(door), START_TIMEOUT_S, "the start of the workers"
            )
            self.base_blocks = self.both("meet")
            self.both("prepare")
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def ask(self, role: str, verb: str, *arguments: object) -> Any:
        """What `role` answers. Raises TransferError with its error, WorkerDied,
        DeadlineExceeded."""
        self._tell(role, verb, arguments)
        return self._hear(role)

    def both(self, verb: str) -> dict[str, Any]:
        for role in ROLES:
            self._tell(role, verb, ())
        return {role: self._hear(role) for role in ROLES}

    def _tell(self, role: str, verb: str, arguments: tuple[object, ...]) -> None:
        try:
            self._told[role].send((verb, arguments))
        except OSError:
            raise self._died(role) from None

    def _hear(self, role: str) -> Any:
        told, deadline_s = self._told[role], time.monotonic() + ANSWER_TIMEOUT_S
        try:
            while not told.poll(LOOK_S):
                self._launcher.check()
                if time.monotonic() > deadline_s:
                    raise DeadlineExceeded(f"the {role}: no answer within {ANSWER_TIMEOUT_S:g} s")
            is_error, value = told.recv()
        except (EOFError, OSError):
            raise self._died(role) from None
        if is_error:
            raise TransferError(f"the {role}: {value}")
        return value

    def _died(self, role: str) -> KvxferError:
        """Why `role`, which hung up, has ended: a process that is killed lets go of a socket first,
        and then, which can take a while, of its memory."""
        try:
            self._launcher.wait_for(lambda: False, LAST_WORDS_S, f"the end of the {role}")
        except (WorkerDied, DeadlineExceeded) as error:
            return error
        raise AssertionError("it waits for what never comes")

    def _start(self, role: str, bench: Path, prefill: str) -> WorkerProcess:
        case = self._case
        base, most = (blocks(role) for blocks in (case.base_blocks, case.capacity_blocks))
        told = [
            *("--role", ROLES[role]),
            *("--bench", str(bench)),
            *("--transfer-blocks", str(case.transfer_blocks)),
            *(("--prefill", prefill) if prefill else ()),
            *("--model", "none"),
            *("--worker-id", role),
            *("--device", case.devices[role]),
            *("--kv-cache-layout", case.layout),
            *("--block-size", str(SPEC.block_size)),
            *("--kv-cache-memory-bytes", str(most * SPEC.block_bytes)),
            *("--kv-commit", "elastic"),
            *("--kv-initial-blocks", str(base)),
            *("--kv-low-watermark", "0"),
            *("--connector", case.lane.connector),
            *("--lane", str(case.lane.direction)),
            "--no-lane-test",
            *("--peer-timeout-s", str(PEER_TIMEOUT_S)),
        ]
        return self._launcher.start(role, MODULE, told)

    def _admit(self, door: socket.socket) -> bool:
        """Whether both have called."""
        with contextlib.suppress(BlockingIOError):
            end, _ = door.accept()
            told = Connection(end.detach())
            names = {name: role for role, name in ROLES.items()}
            self._told[names[told.recv()]] = told
        return len(self._told) == len(ROLES)

    def _hang_up(self) -> None:
        for told in self._told.values():
            told.close()


def _ignore(worker: str, text: str) -> None: ...
