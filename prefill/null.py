"""`python -m prefill.null --model none|pattern`: a prefill worker without a model, for benches."""

from __future__ import annotations

from kvxfer.bench.null_worker import NULL
from kvxfer.command import run_command
from kvxfer.config import WorkerOptions
from kvxfer.worker.process import run_worker
from prefill.__main__ import make_role


def prefill(options: WorkerOptions) -> int:
    """Run a prefill worker that computes nothing, or a pattern, until Ctrl-C."""
    return run_worker("prefill", options, (), make_role, NULL)


if __name__ == "__main__":
    run_command(prefill, "python -m prefill.null", "prefill")
