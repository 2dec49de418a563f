"""What `kvxfer doctor` finds, as every part of kvxfer may report it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One fact about this machine: what was found, and the next step where it is not as it should
    be.

    ok: works, or is only worth knowing. warn: works, but something is slower or less than it could
    be. fail: kvxfer cannot run.
    """

    name: str
    status: Status
    value: str
    hint: str = ""
    """One line: what to do next, or why the value is what it is."""
