"""A lack of memory in the model's own allocations, told as ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from kvxfer.errors import ModelOutOfMemory

P = ParamSpec("P")
R = TypeVar("R")


def tells_lack_of_memory(step: Callable[P, R]) -> Callable[P, R]:
    """`step`, raising ModelOutOfMemory where torch has no memory for it.

    The error is raised outside of the handler, so that it keeps neither torch's own nor its
    frames: what they hold of the failed step has to be free when it is tried again.
    """

    @functools.wraps(step)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return step(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            problem = str(error).splitlines()[0]
        raise ModelOutOfMemory(problem)

    return told
