"""Figures as they are found: printed, and kept on disk from the first one on."""

from __future__ import annotations

import shlex
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from kvxfer.bench.report import Figure, write_figures


class Record:
    """The figures of one run. The file is written anew with each, so that a run which is cut short
    leaves what it had found."""

    def __init__(self, path: Path | None, command: str) -> None:
        self._path = path
        self._command = command
        self.machine = ""
        self.figures: list[Figure] = []

    def add(self, *figures: Figure) -> None:
        """A figure of a metric that was added before takes its place."""
        named = {figure.metric: figure for figure in (*self.figures, *figures)}
        self.figures = list(named.values())
        for figure in figures:
            print(describe(figure), flush=True)
        if self._path is not None:
            write_figures(self._path, self.figures, self._command, self.machine)

    @property
    def exit_code(self) -> int:
        """1 when a bar was missed."""
        return 0 if all(figure.ok for figure in self.figures) else 1


def describe(figure: Figure) -> str:
    """One line for a reader."""
    spread = f" ± {figure.spread_iqr:.3g} (IQR of {figure.runs})" if figure.runs > 1 else ""
    verdict = "ok" if figure.ok else "MISSED"
    bar = "" if figure.bar is None else f" (bar {figure.bar:g}, {verdict})"
    return f"{figure.metric:<44}{figure.value:>14.6g} {figure.unit}{spread}{bar}"


def command_line(name: str, options: Any) -> str:
    """The command that `options`, a dataclass of flags, came from: what is not the default."""
    words = [f"kvxfer bench {name}"]
    for field in fields(options):
        value = getattr(options, field.name)
        default = field.default if field.default is not MISSING else None
        if value == default or field.name == "json":
            continue
        flag = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
            continue
        values = map(str, value) if isinstance(value, tuple) else [str(value)]
        words.append(f"--{flag} {shlex.join(values)}")
    return " ".join(words)
