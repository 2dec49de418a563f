"""`python -m prefill.watched --model pattern`: as `prefill.null`, and it notes when it grows."""

from __future__ import annotations

from kvxfer.bench.scale_worker import StampOptions, stamped
from kvxfer.command import run_command
from kvxfer.config import WorkerOptions
from kvxfer.worker.process import run_worker
from prefill.__main__ import make_role


def watched(options: WorkerOptions, stamps: StampOptions) -> int:
    """Run a prefill worker without a model that writes down when it grew."""
    return run_worker("prefill", options, (), make_role, stamped(stamps))


if __name__ == "__main__":
    run_command(watched, "python -m prefill.watched")
