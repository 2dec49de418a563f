"""A service whose workers are apart: prefill left of a link, decode right of it, and KV on it by
NIXL over TCP. Control goes by Unix sockets, as nothing but this host is talked to without keys."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import ForkServer
from support.service import Service
from support.service_processes import until

from kvxfer.bench.netns import COMMAND_TIMEOUT_S, DEVICE, OVER_TCP, Namespaces, why_not

SIDES = {"prefill": "left", "decode": "right"}


def skip_unless_linked() -> None:
    reason = why_not()
    if reason:
        who = "" if os.geteuid() == 0 else " (they need root)"
        pytest.skip(f"no network namespaces here{who}: {reason}")


class Link(Namespaces):
    """That can fail."""

    def __enter__(self) -> Link:
        """Both ends are up: UCX takes no device that is about to be."""
        super().__enter__()
        states = [
            Path(f"/proc/{holder.pid}/root/sys/class/net/{DEVICE}/operstate")
            for holder in self._holders.values()
        ]
        until(lambda: all(one.read_text() == "up\n" for one in states), 5.0, "the link is up")
        return self

    def cut(self) -> None:
        """Nothing arrives, and nobody is told."""
        self._drop("drop")

    def lose(self, percent: int) -> None:
        self._drop(f"numgen random mod 100 < {percent} counter drop")

    def heal(self) -> None:
        for side in SIDES.values():
            self.nft(side, "delete table inet faults")

    def num_lost(self) -> int:
        text = "".join(self.nft(side, "list table inet faults") for side in SIDES.values())
        return sum(map(int, re.findall(r"counter packets (\d+)", text)))

    def _drop(self, rule: str) -> None:
        for side in SIDES.values():
            self.nft(side, "add table inet faults")
            self.nft(side, "delete table inet faults")
            self.nft(side, "add table inet faults")
            hook = "{ type filter hook input priority 0 ; }"
            self.nft(side, f"add chain inet faults input {hook}")
            self.nft(side, f'add rule inet faults input iifname "{DEVICE}" {rule}')

    def nft(self, side: str, command: str) -> str:
        wrapped = [*self.entering(side), "nft", command]
        done = subprocess.run(wrapped, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout


class LinkedService(Service):
    def __init__(self, server: ForkServer, lane: str, **options: Any) -> None:
        with ExitStack() as undo:
            self.link = undo.enter_context(Link())
            super().__init__(
                server,
                lane=lane,
                connector="nixl",
                environment=dict(OVER_TCP),
                namespaces={role: self.link.paths(side) for role, side in SIDES.items()},
                name=f"{lane} over a link",
                **options,
            )
            self._stack = undo.pop_all()

    def __exit__(self, *arguments: object) -> None:
        super().__exit__(*arguments)
        self._stack.close()
