"""Faults at the moment when a process enters a state: patched into a forked child, so that the
product carries nothing for tests.

An order is a file of JSON: {state, victim, signal, skip, at}. Whoever enters `state`, after having
entered it `skip` times since it found the order, renames the file and sends `signal` to the process
whose pid the file `victim` has by then, which may be itself: at once (`at` is "entry"), or once its
turn of the control loop is over and what it wants to say was said ("turn").
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FIRED = ".fired"


@dataclass(frozen=True)
class Order:
    state: str
    victim: str
    signal: int
    skip: int = 0
    at: str = "entry"

    def place(self, path: Path) -> None:
        path.with_suffix(FIRED).unlink(missing_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(self)))
        draft.rename(path)

    def carry_out(self) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it is gone already
            os.kill(int(Path(self.victim).read_text()), self.signal)


class StateHooks:
    """In the child. Control thread only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._order = ""
        self._seen = 0
        self._pending: Order | None = None

    def entered(self, state: str) -> None:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return
        if text != self._order:
            self._order, self._seen = text, 0
        order = Order(**json.loads(text))
        if order.state != state:
            return
        self._seen += 1
        if self._seen <= order.skip:
            return
        self._path.rename(self._path.with_suffix(FIRED))
        if order.at == "turn":
            self._pending = order
        else:
            order.carry_out()

    def turned(self) -> None:
        order, self._pending = self._pending, None
        if order is not None:
            order.carry_out()


def install(role: str, path: Path) -> None:
    """Watch all states of a worker of this role."""
    import decode.schedule
    import decode.trial
    import prefill.job
    import prefill.lane_trials
    from kvxfer.control import session
    from kvxfer.worker import growth, residency
    from kvxfer.worker.loop import ControlLoop

    hooks = StateHooks(path)
    for kind in (decode.schedule.DecodeRequest, prefill.job.PrefillJob):
        _watch(kind, "state", lambda item, state: hooks.entered(_name(state)))

    def peer_entered(peer: Any, state: Any) -> None:
        is_router = state is session.PeerState.READY and peer.__dict__.get("facts") is None
        if not is_router:
            hooks.entered(f"{role}:{_name(state)}")

    _watch(session.Peer, "state", peer_entered)
    _watch(residency.Residency, "state", lambda _, state: hooks.entered(f"{role}:{_name(state)}"))
    _watch(growth.CacheGrowth, "_state", lambda _, state: hooks.entered(f"{role}:{_name(state)}"))
    _watch(decode.trial.Trial, "trial_id", lambda *_: hooks.entered("LaneTrials.ASKED"))
    _watch(
        decode.trial.Trial,
        "source",
        lambda _, blocks: blocks and hooks.entered("LaneTrials.TRYING"),
    )
    turn = ControlLoop.turn

    def turned(loop: ControlLoop, timeout_s: float) -> None:
        turn(loop, timeout_s)
        hooks.turned()

    ControlLoop.turn = turned  # type: ignore[method-assign]


def _name(state: Any) -> str:
    return f"{type(state).__name__}.{state.name}"


def _watch(kind: type, attribute: str, entered: Callable[[Any, Any], object]) -> None:
    """Have `entered(item, value)` called whenever the attribute was set."""
    setter = kind.__setattr__

    def setattr_(item: Any, name: str, value: Any) -> None:
        setter(item, name, value)
        if name == attribute:
            entered(item, value)

    kind.__setattr__ = setattr_  # type: ignore[method-assign,assignment]
