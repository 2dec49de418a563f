"""What takes long, in steps: between two of them its thread may do something else."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Ends with a T, or raises with nothing changed, as when it is closed before its end."""


def finished(steps: Steps[T]) -> T:
    """All of them, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
