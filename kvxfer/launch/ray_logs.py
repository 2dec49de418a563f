"""What comes from elsewhere, as text here: workers' logs, each in NAME.log, and errors of nodes."""

from __future__ import annotations

from pathlib import Path

from kvxfer.launch.ray_seam import Look

MOST_PARTIAL_BYTES = 64 << 10
"""A line longer than this is cut in two."""
MOST_TEXT = 300
"""Characters of an error."""


class CollectedLog:
    """Of one worker through all its lives, on whichever nodes. Lines are prefixed with the pid and
    the node's address, as Ray does it, but for JSON, which says itself whose it is."""

    def __init__(self, path: Path, *, is_json: bool) -> None:
        self._path = path
        self._is_json = is_json
        self._partial = b""

    def write(self, look: Look) -> None:
        """Whole lines of it. Raises OSError."""
        *lines, self._partial = (self._partial + look.log).split(b"\n")
        is_cut = look.ending or len(self._partial) > MOST_PARTIAL_BYTES
        if is_cut and self._partial:
            lines, self._partial = [*lines, self._partial], b""
        if not lines:
            return
        prefix = b"" if self._is_json else f"(pid={look.pid}, ip={look.ip}) ".encode()
        with self._path.open("ab") as file:
            file.write(b"".join(prefix + line + b"\n" for line in lines))


def last_line(error: BaseException) -> str:
    """Of the traceback of a node: what was raised there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1][:MOST_TEXT]


def one_line(error: BaseException) -> str:
    """All of it, as one line that is not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "…"
