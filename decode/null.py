"""`python -m decode.null --model none|pattern`: a decode worker without a model, for benches."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from decode.__main__ import make_role
from kvxfer.bench.null_worker import NULL
from kvxfer.command import run_command
from kvxfer.config import WorkerOptions
from kvxfer.worker.process import run_worker


def decode(
    options: WorkerOptions,
    *,
    prefill: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
) -> int:
    """Run a decode worker that computes nothing, or a pattern, until Ctrl-C.

    Parameters
    ----------
    prefill
        Address of each prefill worker; it may start later. A router that knows prefill workers
        tells which there are: from then on its word counts.
    """
    return run_worker("decode", options, prefill, make_role, NULL)


if __name__ == "__main__":
    run_command(decode, "python -m decode.null")
