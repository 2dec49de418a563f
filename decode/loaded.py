"""`python -m decode.loaded --model none`: as `decode.null`, with the load of a bench inside."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

from cyclopts import Parameter

from decode.__main__ import make_role
from kvxfer.bench.control_load import LoadChannel, LoadOptions
from kvxfer.bench.null_worker import NULL
from kvxfer.command import run_command
from kvxfer.config import WorkerOptions
from kvxfer.worker.process import run_worker


def loaded(
    options: WorkerOptions,
    load: LoadOptions,
    *,
    prefill: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
) -> int:
    """Run a decode worker that measures hand-overs from the prefill worker without a model.

    Parameters
    ----------
    prefill
        Address of the prefill worker.
    """
    setting = replace(NULL, channel=partial(LoadChannel, options=load))
    return run_worker("decode", options, prefill, make_role, setting)


if __name__ == "__main__":
    run_command(loaded, "python -m decode.loaded")
