"""A log that a peer cannot fill: what it makes us say is bounded in lines and in length."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

BURST = 100
LINES_A_SECOND = 2.0
LONGEST = 600
"""Characters of one line's own text."""
MAX_PLACES = 1000


@dataclass(slots=True)
class _Place:
    """A line of the program that logs."""

    left: float
    seen_s: float
    num_dropped: int = 0


class BoundedLog(logging.Filter):
    """Of each place that logs, passes BURST lines and then LINES_A_SECOND; the next line that
    passes says how many did not. Errors always pass. Every text becomes one printable line."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._places: dict[tuple[str, int], _Place] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        dropped = 0
        if record.levelno < logging.ERROR:
            place = self._place(record)
            if place.left < 1:
                place.num_dropped += 1
                return False
            place.left -= 1
            dropped, place.num_dropped = place.num_dropped, 0
        record.msg, record.args = one_line(record.getMessage()), None
        if dropped:
            record.msg += f" (and {dropped} more such lines, left out)"
        return True

    def _place(self, record: logging.LogRecord) -> _Place:
        now, key = self._now(), (record.pathname, record.lineno)
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= MAX_PLACES:
                self._places.clear()
            place = self._places[key] = _Place(BURST, now)
        place.left = min(BURST, place.left + (now - place.seen_s) * LINES_A_SECOND)
        place.seen_s = now
        return place


def one_line(text: str) -> str:
    """Printable, and not longer than LONGEST: what a peer sends may end up in it."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}... ({len(text) - LONGEST} characters more)"
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]
