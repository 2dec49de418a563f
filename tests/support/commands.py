"""Running the project's commands as a user does."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
TINY_MODEL = ROOT / "kvxfer" / "model" / "tiny"
KVXFER = (sys.executable, "-m", "kvxfer.cli")


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str

    def check_one_clear_line(self, code: int, *mentioned: str) -> None:
        """The given exit code, one line on stderr that mentions each text, no traceback."""
        assert self.code == code, self
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self
        for text in mentioned:
            assert text in lines[0], self


def run(*command: str, timeout_s: float = 120.0, **environment: str) -> Finished:
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment if environment else None,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def demo(*options: str, timeout_s: float = 150.0) -> tuple[Finished, dict[str, Any]]:
    """`kvxfer demo --json` and what it printed."""
    done = run(*KVXFER, "demo", "--json", *options, timeout_s=timeout_s)
    return done, json.loads(done.out) if done.out else {}
