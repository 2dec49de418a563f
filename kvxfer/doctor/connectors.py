"""Connectors, each tried out by its own program: connectors.NAME_checks prints its checks."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from kvxfer.telemetry.checks import Check

TIMEOUT_S = 20.0
"""Of a connector's program. It takes 2 to 3 s on 2 cores: it imports torch and NIXL."""


def connector_checks(name: str, timeout_s: float = TIMEOUT_S) -> list[Check]:
    """Nothing of the program is left when this returns, however it ends."""
    label = f"connector {name}"
    command = [sys.executable, "-P", "-m", f"connectors.{name}_checks"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        hint = "is the machine overloaded? Run `kvxfer doctor` again"
        return [Check(label, "warn", f"gave no answer in {timeout_s:g} s", hint)]
    return read_answer(label, done.returncode, done.stdout, done.stderr)


def read_answer(label: str, code: int, output: bytes, errors: bytes) -> list[Check]:
    """Pure: the checks that a connector's program printed, or what went wrong with it."""
    try:
        if code == 0:
            return msgspec.json.decode(output, type=list[Check])
    except msgspec.MsgspecError as error:
        return [Check(label, "fail", f"its answer does not decode: {error}", "report a bug")]
    last = errors.decode(errors="replace").strip().rpartition("\n")[2]
    return [Check(label, "fail", f"its program ended with {code}", last or "without a word")]


def loopback_checks() -> list[Check]:
    return [Check("connector loopback", "ok", "within one process", "for tests, host memory only")]
