"""`python -m prefill --model DIR`: run a prefill worker until Ctrl-C."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.command import run_command
from kvxfer.config import WorkerOptions
from kvxfer.worker.process import run_worker

if TYPE_CHECKING:
    from kvxfer.worker.assembly import WorkerParts
    from kvxfer.worker.loop import Role


def prefill(options: WorkerOptions) -> int:
    """Run a prefill worker: computes prompts and hands their KV to decode workers.

    It binds --listen, prints where, and serves until Ctrl-C. Example:
    python -m prefill --model DIR --listen tcp://127.0.0.1:5601
    """
    return run_worker("prefill", options, (), make_role)


def make_role(parts: WorkerParts) -> Role:
    from prefill.worker import PrefillWorker

    return PrefillWorker(parts)


if __name__ == "__main__":
    run_command(prefill, "python -m prefill", "prefill")
