"""NIXL's Python API, loaded once, and the one place where its exceptions become ours.

Facts (nixl 1.5.1):
- Its exceptions share no base class; of the rest of the C++ side pybind makes RuntimeError and
  ValueError.
- Importing nixl sets `logging.raiseExceptions` to False for the whole process (read in its source).
"""

from __future__ import annotations

import functools
import logging
import re
from types import TracebackType
from typing import Any

import numpy as np

from connectors.nixl_environment import prepare_environment
from kvxfer.errors import ConnectorError
from kvxfer.transfer.regions import Int64Array


def segment_of(device: str) -> tuple[str, int]:
    """NIXL's memory type and device id of torch's device name; ConnectorError for others."""
    if device == "cpu":
        return "DRAM", 0
    found = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", device)
    if found:
        return "VRAM", int(found[1] or 0)
    raise ConnectorError(f"NIXL moves no memory of device {device!r}")


def descriptors(base: int, offsets: Int64Array, sizes: Int64Array, device: str) -> Int64Array:
    """[N, 3] of (address, bytes, device id)."""
    rows = np.empty((len(offsets), 3), dtype=np.int64)
    rows[:, 0] = offsets + base
    rows[:, 1] = sizes
    rows[:, 2] = segment_of(device)[1]
    return rows


@functools.cache
def load_nixl() -> Any:
    """nixl._api, with the environment it reads prepared. Costs seconds: it imports torch."""
    prepare_environment()
    raise_exceptions = logging.raiseExceptions
    try:
        from nixl import _api
    except ImportError as error:
        raise ConnectorError(f"nixl cannot be imported: {error}") from error
    finally:
        logging.raiseExceptions = raise_exceptions
    return _api


@functools.cache
def _foreign_errors() -> tuple[type[Exception], ...]:
    """Every exception class of the bindings, and what pybind makes of C++ exceptions."""
    found = [value for value in vars(load_nixl().nixlBind).values() if isinstance(value, type)]
    own = [value for value in found if issubclass(value, Exception)]
    return (*own, RuntimeError, ValueError)


class translated:
    """The one place where an exception of NIXL becomes one of ours. A class, since a generator
    takes three times as long, and calls take microseconds."""

    __slots__ = ("_call",)

    def __init__(self, call: str) -> None:
        self._call = call

    def __enter__(self) -> None:
        """Nothing to be done."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and isinstance(error, _foreign_errors()):
            raise ConnectorError(f"NIXL {self._call}: {type(error).__name__}: {error}") from error
