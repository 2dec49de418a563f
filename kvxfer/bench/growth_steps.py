"""The steps of a growth, a shrink, a sleep and a wake-up, cut out of one clock. Pure.

Each step begins where the one before it ends, so that their sum is the whole, and what two threads
do at once is counted once, for the one that is waited for. All processes of a host read the same
CLOCK_MONOTONIC.

| growth, wake | from there until                                                            |
| ---          | ---                                                                         |
| extend       | the cache is committed: from the wish, over the mailbox of the transfer     |
|              | thread, which does this and the next two, between polls of transfers        |
| register     | every connector has registered the new regions                              |
| describe     | they are described, and so is all that is registered, for peers to come     |
| publish      | the peer's transfer thread begins to learn them: control threads, one       |
|              | message, the peer's mailbox                                                 |
| connect      | the peer's connectors know them                                             |
| acknowledge  | the bound is raised: the memory is usable                                   |
| write        | a pattern is in the last new block (nothing where the peer is to push)      |
| move         | that block has been moved: the word to the peer, its plan, the transfer     |
| verify       | every byte of it was compared                                               |

| shrink, sleep| from there until                                                            |
| ---          | ---                                                                         |
| revoke       | what stays is described, in a new epoch of the transport (NIXL: an agent)   |
| publish      | the peer's transfer thread begins to learn it afresh                        |
| renew        | it has: nothing of the peer's touches what goes                             |
| acknowledge  | the owner's transfer thread begins to deregister                            |
| deregister   | it has                                                                      |
| unmap        | the memory is given back                                                    |
| settle       | whoever asked for it has the answer                                         |

The end of an agent that nobody uses any more comes after; it is not counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.errors import TransferError
from kvxfer.memory.steps import Steps

GROW_STEPS = (
    *("extend", "register", "describe", "publish", "connect", "acknowledge"),
    *("write", "move", "verify"),
)
SHRINK_STEPS = (*("revoke", "publish", "renew", "acknowledge", "deregister", "unmap", "settle"),)
USABLE = GROW_STEPS[: GROW_STEPS.index("write")]
"""Until the memory is usable."""


@dataclass(frozen=True, slots=True)
class Lap:
    """One call of what is listened to, in seconds of CLOCK_MONOTONIC."""

    name: str
    begin_s: float
    end_s: float


class Laps:
    """When methods of a worker's parts were called. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: list[Lap] = []

    def listen(self, part: object, *names: str) -> None:
        """From now on, note each call of these methods of `part`, which does what it did."""
        for name in names:
            setattr(part, name, self._noted(name, getattr(part, name)))

    def listen_to_steps(self, part: object, method: str, name: str) -> None:
        """The same of one that does it in steps (`memory.steps`), which `name` is for."""
        steps_of = getattr(part, method)

        def noted(*arguments: Any) -> Steps[Any]:
            begin_s = time.monotonic()
            try:
                return (yield from steps_of(*arguments))
            finally:
                self._add(Lap(name, begin_s, time.monotonic()))

        setattr(part, method, noted)

    def take(self) -> list[Lap]:
        """Those since the last time, in order of their ends."""
        with self._lock:
            found, self._found = self._found, []
        return found

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            begin_s = time.monotonic()
            try:
                return call(*arguments, **named)
            finally:
                self._add(Lap(name, begin_s, time.monotonic()))

        return noted

    def _add(self, lap: Lap) -> None:
        with self._lock:
            self._found.append(lap)


@dataclass(frozen=True, slots=True)
class Grown:
    """A growth or a wake-up, as its owner and then the peer saw it."""

    begin_s: float
    usable_s: float
    written_s: float
    verified_s: float
    added_bytes: int
    laps: Sequence[Lap]


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A shrink or a sleep, as its owner saw it; `lost` of the blocks below the bound do not hold
    what they held."""

    begin_s: float
    end_s: float
    lost: int
    laps: Sequence[Lap]


def grow_steps(
    grown: Grown, far: Sequence[Lap], far_moments: Mapping[str, float]
) -> dict[str, float]:
    """Milliseconds of each of GROW_STEPS. `far` are the peer's laps, `far_moments` when it had
    'moved' the new block and, where it is the one that compares, 'verified' it. Raises
    TransferError where a step is missing or out of order."""
    connects = _within("connect", far, grown.begin_s, grown.usable_s)
    moments = [
        grown.begin_s,
        _within("extend", grown.laps, grown.begin_s, grown.usable_s)[-1].end_s,
        _within("register", grown.laps, grown.begin_s, grown.usable_s)[-1].end_s,
        _within("describe", grown.laps, grown.begin_s, grown.usable_s)[-1].end_s,
        connects[0].begin_s,
        connects[-1].end_s,
        grown.usable_s,
        grown.written_s,
        far_moments["moved"],
        far_moments.get("verified", grown.verified_s),
    ]
    return _cut(GROW_STEPS, moments)


def shrink_steps(shrunk: Shrunk, far: Sequence[Lap]) -> dict[str, float]:
    """Milliseconds of each of SHRINK_STEPS; otherwise as `grow_steps`."""
    near, begin_s, end_s = shrunk.laps, shrunk.begin_s, shrunk.end_s
    renews = _within("renew", far, begin_s, end_s)
    deregisters = _within("deregister", near, begin_s, end_s)
    unmapped = [*_laps("shrink", near), *_laps("sleep", near)]
    if not unmapped:
        raise TransferError("no memory was given back")
    moments = [
        begin_s,
        _within("revoke", near, begin_s, end_s)[-1].end_s,
        renews[0].begin_s,
        renews[-1].end_s,
        deregisters[0].begin_s,
        deregisters[-1].end_s,
        unmapped[-1].end_s,
        end_s,
    ]
    return _cut(SHRINK_STEPS, moments)


def _laps(name: str, laps: Sequence[Lap]) -> list[Lap]:
    return [lap for lap in laps if lap.name == name]


def _within(name: str, laps: Sequence[Lap], begin_s: float, end_s: float) -> list[Lap]:
    found = [one for one in _laps(name, laps) if begin_s <= one.begin_s and one.end_s <= end_s]
    if not found:
        raise TransferError(f"nothing did {name} between the beginning and the end")
    return found


def _cut(names: Sequence[str], moments: Sequence[float]) -> dict[str, float]:
    spans = {
        name: (end - begin) * 1e3
        for name, begin, end in zip(names, moments[:-1], moments[1:], strict=True)
    }
    for name, ms in spans.items():
        if ms < 0:
            raise TransferError(f"{name} ended {-ms:.3f} ms before it began")
    return spans
