"""Handles on processes with a connector over growable memory (`peer_process`)."""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from support.peer_process import pattern

SCRIPT = Path(__file__).with_name("peer_process.py")
TIMEOUT_S = 60.0
KIB, MIB = 1 << 10, 1 << 20
_names = count()


def descriptors_and_mappings() -> tuple[int, int]:
    """How many open files this process has, and how many mapped chunks of host memory."""
    maps = Path("/proc/self/maps").read_text()
    return len(list(Path("/proc/self/fd").iterdir())), maps.count("memfd:kvxfer")


class Refusal(Exception):
    """The other process answered with an error of ours."""


class PeerProcess:
    """A child; each call of `ask` runs one of its commands."""

    def __init__(
        self,
        size_bytes: int,
        seed: int,
        directory: Path,
        *,
        device: str = "cpu",
        connector: str = "peer",
        wrapper: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = f"agent-{os.getpid()}-{next(_names)}"
        self.seed = seed
        self.is_forgiven = False
        command = sys.executable, str(SCRIPT)
        self._process = subprocess.Popen(
            [*wrapper, *command, self.name, str(size_bytes), str(seed), device, connector],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "KVXFER_PEER_DIR": str(directory), **(environment or {})},
            text=True,
        )

    def ask(self, name: str, *arguments: Any) -> Any:
        """Its answer, or Refusal."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(TIMEOUT_S):
                raise TimeoutError(f"{name} was not answered in {TIMEOUT_S:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"the process ended with {self._process.wait(TIMEOUT_S)} at {name}")
        answer = json.loads(line)
        if "error" in answer:
            raise Refusal(answer["error"])
        return answer["answer"]

    @property
    def base(self) -> int:
        base: int = self.ask("facts")["base"]
        return base

    def meet(self, owner: PeerProcess, description: str) -> None:
        """Connect to `owner`, or learn more of it."""
        self.ask("connect", "owner", owner.base, description, owner.ask("invite"))

    def holds(self, owner: PeerProcess, chunk: tuple[int, int], at: int | None = None) -> bool:
        """Whether it has the owner's chunk (offset, size), at the same offset or `at`."""
        offset, size = chunk
        expected = hashlib.blake2b(pattern(owner.seed, offset, size).tobytes()).hexdigest()
        found: str = self.ask("digest", offset if at is None else at, size)
        return found == expected

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT_S)

    def forgive(self) -> None:
        """It has ended, not well, as it should."""
        self.is_forgiven = True

    def end(self) -> int:
        """Its exit code; it closes what it has."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            return self._process.wait(TIMEOUT_S)
        finally:
            if self._process.poll() is None:
                self.kill()
            self._process.stdout.close()


MakePeer = Callable[..., PeerProcess]


@contextmanager
def peers_in(directory: Path) -> Iterator[MakePeer]:
    """Makes processes that end with it, all of which had to be closed well or killed."""
    made: list[PeerProcess] = []

    def make(size_bytes: int, seed: int, **options: Any) -> PeerProcess:
        made.append(PeerProcess(size_bytes, seed, directory, **options))
        return made[-1]

    try:
        yield make
    finally:
        codes = {one.name: one.end() for one in made}
        codes = {one.name: codes[one.name] for one in made if not one.is_forgiven}
    assert set(codes.values()) <= {0, -signal.SIGKILL}, codes
