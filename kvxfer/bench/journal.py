"""What a long bench has found so far, so that one which was cut short goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvxfer.bench.report import measured_commit


class Journal:
    """One JSON line for each finished piece of one command's run, of one commit. Kept beside the
    figures until `close`; without a path nothing is kept."""

    def __init__(self, figures: Path | None, command: str) -> None:
        self._path = None if figures is None else figures.with_suffix(".journal")
        self._run = f"{measured_commit()} {command}"
        self._found: dict[str, Any] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text().splitlines():
                entry = json.loads(line)
                if entry["run"] == self._run:
                    self._found[entry["piece"]] = entry["value"]

    def get(self, piece: str) -> Any:
        """What was found for it, or None."""
        return self._found.get(piece)

    def keep(self, piece: str, value: Any) -> None:
        self._found[piece] = value
        if self._path is not None:
            entry = {"run": self._run, "piece": piece, "value": value}
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        """The run is complete."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
