"""`python -m decode --model DIR --prefill ADDRESS`: run a decode worker until Ctrl-C."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from kvxfer.command import run_command
from kvxfer.config import WorkerOptions
from kvxfer.worker.process import run_worker

if TYPE_CHECKING:
    from kvxfer.worker.assembly import WorkerParts
    from kvxfer.worker.loop import Role


def decode(
    options: WorkerOptions,
    *,
    prefill: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
) -> int:
    """Run a decode worker: takes prompts from routers, their KV from prefill workers.

    Example: python -m decode --model DIR --listen tcp://127.0.0.1:5602
    --prefill tcp://127.0.0.1:5601

    Parameters
    ----------
    prefill
        Address of each prefill worker; it may start later. A router that knows prefill workers
        tells which there are: from then on its word counts.
    """
    return run_worker("decode", options, prefill, make_role)


def make_role(parts: WorkerParts) -> Role:
    from decode.worker import DecodeWorker

    return DecodeWorker(parts)


if __name__ == "__main__":
    run_command(decode, "python -m decode")
