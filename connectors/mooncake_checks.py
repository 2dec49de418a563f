"""Whether Mooncake's engine works on this machine, for `kvxfer doctor`: run as a program, it prints
JSON.

In a process of its own, since loading the engine starts threads that do not end.
"""

from __future__ import annotations

import sys

import msgspec

from connectors.mooncake import MooncakeConnector
from connectors.mooncake_engine import HOST, installed_version, own_host, start_engine
from kvxfer.errors import KvxferError
from kvxfer.telemetry.checks import Check

NAME = "connector mooncake"


def checks() -> list[Check]:
    """It is optional: that it is missing is only worth knowing."""
    if reason := MooncakeConnector.why_missing():
        return [Check(NAME, "ok", "not installed", f"optional; {reason}")]
    try:
        host = own_host()
        start_engine(host)
    except KvxferError as error:
        return [Check(NAME, "warn", str(error), f"set {HOST} to an address of this host")]
    value = f"{installed_version()}, an engine started at {host} ({HOST})"
    return [Check(NAME, "ok", value, "over TCP; its ports ask nobody who they are")]


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(checks()))
