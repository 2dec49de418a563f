"""A transport tried out on scratch memory, by a pair of agents of its own."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.errors import ConnectorError
from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.reach import RemotePeer
from kvxfer.transfer.regions import Region, RegionSet

if TYPE_CHECKING:
    from kvxfer.transfer.agent import Agent

TIMEOUT_S = 20.0
POLL_INTERVAL_S = 0.0005


def exercise_pair(
    agent_class: type[Agent], name: str, scratch: MemoryWindow, undo: ExitStack
) -> None:
    """Move the first half of `scratch` from one agent to the second half of another, pushed and
    then pulled. Both agents are kept, and with them what they took, until `undo` is closed."""
    half = scratch.size_bytes // 2
    region = Region(0, half)
    windows = [
        MemoryWindow(scratch.base_address + start, half, scratch.device) for start in (0, half)
    ]
    agents = [agent_class(f"{name}-{index}", window) for index, window in enumerate(windows)]
    for agent in agents:
        undo.callback(agent.deregister, agent.register(region))
    peers = [
        RemotePeer(f"{name}-{index}", window.device, window.base_address, RegionSet((region,), 1))
        for index, window in enumerate(windows)
    ]
    for agent, peer, other in zip(agents, reversed(peers), reversed(agents), strict=True):
        agent.add_peer(peer, other.metadata([region]))
        undo.callback(agent.remove_peer, peer.agent)
    column = np.zeros(1, dtype=np.int64)
    plan = TransferPlan.of_runs(column, column, column + half)
    for direction in Direction:
        _finish(agents, agents[0].start(direction, peers[1], plan))


def _finish(agents: list[Agent], handle: object) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not agents[0].is_finished(handle):
        agents[1].progress()
        if time.monotonic() > deadline_s:
            raise ConnectorError(f"a transfer of scratch memory took over {TIMEOUT_S:g} s")
        time.sleep(POLL_INTERVAL_S)
