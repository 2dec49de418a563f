"""Where an answer ends because of its text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Text goes in as it comes, and comes out as far as no stop string can begin in it.

    The outcome is that of text which comes character by character, however it is cut: the answer
    ends at the first character with which a stop string is complete; of several that end there the
    longest counts, and the answer is what stood before it (or with it, if `includes`).
    """

    def __init__(self, stops: Sequence[str], *, includes: bool = False) -> None:
        """No stop string may be empty."""
        self._stops = tuple(dict.fromkeys(stops))
        self._includes = includes
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that ended the answer; what comes after it is dropped."""

    def push(self, text: str) -> str:
        """What may be told now."""
        if self.stopped_by is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.stopped_by = min(found)
            self._held = ""
            return text[: end if self._includes else start]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The answer ended in another way: what was held back. Call it once, at the end."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters of the longest end of `text` that begins `stop`, and is not all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
