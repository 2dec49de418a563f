"""Whether memory can be handed over on this host, for `kvxfer doctor`: run as a program, it prints
JSON."""

from __future__ import annotations

import stat
import sys

import msgspec

from connectors.handover_socket import DIRECTORY, Listener, socket_directory
from kvxfer.errors import KvxferError
from kvxfer.telemetry.checks import Check


def checks() -> list[Check]:
    """Listen in the sockets' directory for a moment; it is made where it is missing."""
    try:
        directory = socket_directory()
        Listener(directory).close()
    except KvxferError as error:
        hint = f"set {DIRECTORY} to a short path that only this user can enter"
        return [Check("connector peer", "warn", str(error), f"{hint}; nixl works without")]
    mode = stat.S_IMODE(directory.stat().st_mode)
    value = f"sockets in {directory} (mode {mode:o}, {len(str(directory))} bytes)"
    hint = f"workers of one host; containers share this directory ({DIRECTORY}), and only it"
    return [Check("connector peer", "ok", value, hint)]


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(checks()))
