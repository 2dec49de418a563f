"""Files of figures, as kvxfer.bench.report writes them, read back and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from kvxfer.errors import UsageError


class Result(msgspec.Struct, frozen=True):
    """A figure with what it was measured on, of which commit, and how."""

    metric: str
    value: float
    unit: str
    bar: float | None
    better: Literal["higher", "lower"]
    ok: bool
    runs: int
    spread_iqr: float
    machine: str
    versions: dict[str, str]
    commit: str
    command: str


def read_results(path: Path) -> list[Result]:
    """In the file's order, metrics differ. Raises UsageError where it is no list of figures, or
    where `ok` is not what value and bar say."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[Result] | Result)
    except OSError as error:
        raise UsageError("figures", str(path), error.strerror or str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError("figures", str(path), f"is no list of figures: {error}") from None
    results = found if isinstance(found, list) else [found]
    seen: set[str] = set()
    for result in results:
        if result.metric in seen:
            raise UsageError("figures", str(path), f"has {result.metric!r} twice")
        seen.add(result.metric)
        if result.ok and not _reaches(result):
            raise UsageError("figures", str(path), f"{result.metric!r} is ok, and misses its bar")
    return results


def _reaches(result: Result) -> bool:
    if result.bar is None:
        return True
    if result.better == "higher":
        return result.value >= result.bar
    return result.value <= result.bar
