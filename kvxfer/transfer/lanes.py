"""Which way KV flows between two workers: a pure function of both sides' facts."""

from __future__ import annotations

from kvxfer.errors import HandshakeRejected
from kvxfer.transfer.connector import Direction

AUTO = "auto"
LANES = (AUTO, *Direction)


def choose_direction(ours: str, theirs: str, devices: tuple[str, str]) -> Direction:
    """The direction that both asked for; `auto` follows the other, or the kind of memory.

    Measured: NIXL pulls growable GPU memory of one host at 250–300 GB/s and pushes it at 0.5; on
    the host both are cross-memory copies, and over TCP pushing is 2–4 times faster.
    """
    wanted = {lane for lane in (ours, theirs) if lane != AUTO}
    if len(wanted) > 1 or not wanted.issubset(LANES):
        raise HandshakeRejected("lane", ours, theirs)
    if wanted:
        return Direction(wanted.pop())
    on_gpu = any(device.startswith("cuda") for device in devices)
    return Direction.PULL if on_gpu else Direction.PUSH
