"""What the workers of a router look like from inside, as they said last; asked for while somebody
looks, and not otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.control.view_messages import View, ViewQuery
from kvxfer.telemetry.trace import now_ns

PATIENCE_NS = 2_000_000_000
"""After which an answer is not waited for any more: it, or the question, may have been lost."""
DRIFT_NS = 60_000_000_000
"""How long a measured difference of clocks is kept while longer ways measure it anew."""


@dataclass
class HeldView:
    """The newest View of one worker, and where its clock is."""

    view: View | None = None
    asked_ns: int = 0
    """Ours, of the question that has no answer yet; 0: there is none."""
    offset_ns: int = 0
    """What to add to the worker's clock to have ours; as exact as half of `way_ns`."""
    way_ns: int = 0
    """Between question and answer, the shortest lately."""
    measured_ns: int = 0

    def place_s(self, worker_ns: int) -> float:
        """A time of the worker's in seconds of our CLOCK_MONOTONIC."""
        return (worker_ns + self.offset_ns) / 1e9


class ViewTable:
    """By the key of the worker. One thread: the router's."""

    def __init__(self) -> None:
        self._held: dict[str, HeldView] = {}

    def get(self, key: str) -> HeldView | None:
        """None, too, while there is no View of it."""
        held = self._held.get(key)
        return held if held is not None and held.view is not None else None

    def query(self, key: str) -> ViewQuery | None:
        """What to ask now; None while an answer is on its way."""
        held, now = self._held.setdefault(key, HeldView()), now_ns()
        if held.asked_ns and now - held.asked_ns < PATIENCE_NS:
            return None
        held.asked_ns = now
        return ViewQuery(now)

    def took(self, key: str, view: View) -> None:
        """An answer. One to another question than the last is dropped: it says nothing of when."""
        held, now = self._held.get(key), now_ns()
        if held is None or not held.asked_ns or view.asked_ns != held.asked_ns:
            return
        way_ns = now - held.asked_ns
        is_old = now - held.measured_ns > DRIFT_NS
        if held.view is None or way_ns < held.way_ns or is_old:
            held.way_ns, held.measured_ns = way_ns, now
            held.offset_ns = held.asked_ns + way_ns // 2 - view.now_ns
        held.view, held.asked_ns = view, 0

    def clear(self) -> None:
        """Nobody looked for a while: what is held is of then."""
        self._held.clear()

    def forget(self, key: str) -> None:
        """The worker is lost: what it showed is no more, and its clock may be another's."""
        self._held.pop(key, None)
