"""Rank 0's view of another rank's process: started, talked to, and surely ended.

Facts relied on (Linux): PR_SET_PDEATHSIG, with which a follower dies when rank 0 does, takes the
thread that started a process for its parent, so that thread has to live as long: the main one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from kvxfer.model.tensor_parallel import TensorParallel
from kvxfer.telemetry.logs import as_set_up
from kvxfer.worker.rank_methods import LineName
from kvxfer.worker.rank_process import Place
from kvxfer.worker.rank_wire import Line

MODULE = "kvxfer.worker.rank_process"
KILL_TIMEOUT_S = 5.0
"""For the kernel to end a killed process, with all its memory."""


@dataclass
class Follower:
    """A process of ours, and this end of its lines."""

    rank: int
    process: subprocess.Popen[bytes]
    lines: dict[LineName, Line]

    def fate(self) -> str:
        """How it ended, or that it lives."""
        code = self.process.poll()
        if code is None:
            return "does not answer"
        if code >= 0:
            return f"ended with code {code}"
        known = {number.value: number.name for number in signal.Signals}
        return f"was killed by {known.get(-code, f'signal {-code}')}"

    def end(self, timeout_s: float) -> None:
        """Close its lines, and see to it that it is gone within about `timeout_s`. Idempotent."""
        for line in self.lines.values():
            line.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(KILL_TIMEOUT_S)


def start_follower(first: TensorParallel, rank: int, device: str) -> Follower:
    """Run follower `rank` of the group that `first` belongs to."""
    with ExitStack() as undo:
        lines, theirs = {}, {}
        for name in LineName:
            ours, other = socket.socketpair()
            lines[name] = Line(ours)
            undo.callback(ours.close)
            theirs[name] = other
        worker_id, log_format = as_set_up()
        with ExitStack() as given:
            for other in theirs.values():
                given.callback(other.close)
            place = Place(
                rank=rank,
                size=first.size,
                rendezvous=str(first.rendezvous),
                device=device,
                parent=os.getpid(),
                lines={str(name): other.fileno() for name, other in theirs.items()},
                worker_id=worker_id,
                log_format=log_format,
            )
            argument = msgspec.json.encode(place).decode()
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, argument],
                stdin=subprocess.DEVNULL,
                pass_fds=list(place.lines.values()),
                start_new_session=True,
            )
        undo.pop_all()
    return Follower(rank, process, lines)
