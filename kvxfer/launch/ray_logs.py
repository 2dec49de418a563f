"""The logs of workers elsewhere, each in a file here: NAME.log, with where a line was written."""

from __future__ import annotations

from pathlib import Path

from kvxfer.launch.ray_seam import Look

MOST_PARTIAL_BYTES = 64 << 10
"""A line longer than this is cut in two."""


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
