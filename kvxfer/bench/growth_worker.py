"""`python -m kvxfer.bench.growth_worker`: a worker of `kvxfer bench growth`, prefill or decode.

As in service but for the model, of which there is none, and the role, which does what the bench
asks it for over a Unix socket.
"""

from __future__ import annotations

import socket
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvxfer.command import run_command
from kvxfer.config import WorkerOptions
from kvxfer.control.auth import Keys
from kvxfer.control.channel import Channel
from kvxfer.errors import UsageError
from kvxfer.worker.process import Setting, run_worker

if TYPE_CHECKING:
    from kvxfer.bench.growth_end import GrowthEnd
    from kvxfer.worker.assembly import StartEngine, WorkerParts


def growth_worker(
    options: WorkerOptions,
    *,
    role: Literal["prefill", "decode"],
    bench: Path,
    transfer_blocks: int,
    prefill: str = "",
) -> int:
    """Run one until the bench at the Unix socket `bench` is done.

    Parameters
    ----------
    role
        The source's or the target's.
    bench
        Unix socket of the command that started this.
    transfer_blocks
        Blocks of each transfer in flight.
    prefill
        Address of the source, for the target.
    """
    with _connect(bench) as told:
        told.send(role)

        def channel(identity: str, listen: str, keys: Keys | None) -> Channel:
            made = Channel(identity, listen, keys)
            made.watch(told.fileno())
            return made

        def make_role(parts: WorkerParts) -> GrowthEnd:
            from kvxfer.bench.growth_end import GrowthEnd

            return GrowthEnd(parts, told, role, transfer_blocks)

        dial = (prefill,) if prefill else ()
        return run_worker(role, options, dial, make_role, Setting(channel, _load_start))


def _connect(bench: Path) -> Connection:
    with socket.socket(socket.AF_UNIX) as end:
        try:
            end.connect(str(bench))
        except OSError as error:
            raise UsageError("bench", str(bench), error.strerror or str(error)) from None
        return Connection(end.detach())


def _load_start() -> StartEngine:
    from kvxfer.bench.growth_end import GrowthStart
    from kvxfer.worker.engine import start_engine

    return partial(start_engine, kind=GrowthStart)


if __name__ == "__main__":
    run_command(growth_worker, "python -m kvxfer.bench.growth_worker")
