"""Bare NIXL, as a program without a connector would use it: what ours is compared with.

Not for workers. It registers what it is told, hands NIXL the runs of a plan as rows that it made
when it saw the plan first, posts, and asks for the state until it is done. It keeps no account of
regions, checks no plan, tells errors as NIXL does, and has one transfer at a time.

NIXL reads the environment that connectors/nixl_environment.py prepares, and starts a progress
thread by the same rule, which KVXFER_NIXL_PROGRESS_THREAD overrides.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from connectors.nixl_api import descriptors, load_nixl, segment_of, translated
from connectors.nixl_environment import progress_thread_setting, usable_cores
from kvxfer.errors import ConnectorError
from kvxfer.transfer.connector import Connector, Direction, MemoryWindow, TicketResult
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Int64Array, Region

_TICKET = 1


@dataclass(frozen=True, slots=True)
class _Peer:
    agent: str
    base_address: int
    device: str


class BareNixl(Connector):
    """One peer, one transfer at a time."""

    def __init__(self, agent_name: str, memory: MemoryWindow) -> None:
        self._memory = memory
        self._segment = segment_of(memory.device)[0]
        self._peer: _Peer | None = None
        self._handles: dict[tuple[Region, ...], Any] = {}
        self._handle: Any = None
        self._rows: tuple[TransferPlan, Int64Array, Int64Array] | None = None
        choice = progress_thread_setting(os.environ, usable_cores())
        api = load_nixl()
        with translated("agent"):
            config = api.nixl_agent_config(enable_prog_thread=choice.value == "1", backends=["UCX"])
            self._agent = api.nixl_agent(agent_name, config)

    def register(self, regions: Sequence[Region]) -> None:
        offsets = np.array([region.offset for region in regions], dtype=np.int64)
        sizes = np.array([region.size for region in regions], dtype=np.int64)
        memory = self._memory
        rows = descriptors(memory.base_address, offsets, sizes, memory.device)
        with translated("register_memory"):
            handle = self._agent.register_memory(rows, self._segment)
        self._handles[tuple(regions)] = handle

    def deregister(self, regions: Sequence[Region]) -> None:
        with translated("deregister_memory"):
            self._agent.deregister_memory(self._handles.pop(tuple(regions)))

    def describe(self, regions: Sequence[Region]) -> bytes:
        """Of all regions: bare NIXL's whole metadata."""
        with translated("get_agent_metadata"):
            metadata = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode((metadata, self._memory.device))

    def connect(
        self, peer: str, base_address: int, description: bytes, invitation: bytes = b""
    ) -> None:
        metadata, device = msgspec.msgpack.decode(description, type=tuple[bytes, str])
        with translated("add_remote_agent"):
            name = self._agent.add_remote_agent(metadata)
        name = name.decode() if isinstance(name, bytes) else name
        self._peer = _Peer(name, base_address, device)

    def submit(self, peer: str, direction: Direction, plan: TransferPlan) -> int:
        if self._peer is None or self._handle is not None:
            raise ConnectorError("bare NIXL has no peer, or a transfer already")
        ours, theirs = self._rows_of(plan, direction, self._peer)
        far = segment_of(self._peer.device)[0]
        agent, operation = self._agent, "WRITE" if direction is Direction.PUSH else "READ"
        with translated("transfer"):
            here = agent.get_xfer_descs(ours, self._segment)
            there = agent.get_xfer_descs(theirs, far)
            handle = agent.initialize_xfer(operation, here, there, self._peer.agent)
            agent.transfer(handle)
        self._handle = handle
        return _TICKET

    def poll(self) -> list[TicketResult]:
        with translated("check_xfer_state"):
            if self._handle is None:
                self._agent.get_new_notifs()  # serves the peer where there is no progress thread
                return []
            state = self._agent.check_xfer_state(self._handle)
            if state == "PROC":
                return []
            self._agent.release_xfer_handle(self._handle)
        self._handle = None
        return [TicketResult(_TICKET, None if state == "DONE" else f"NIXL says {state}")]

    def disconnect(self, peer: str) -> None:
        if self._peer is not None:
            with translated("remove_remote_agent"):
                self._agent.remove_remote_agent(self._peer.agent)
        self._peer = None

    def close(self) -> None:
        """The agent goes with its last reference."""
        self.disconnect("")

    def _rows_of(
        self, plan: TransferPlan, direction: Direction, peer: _Peer
    ) -> tuple[Int64Array, Int64Array]:
        if self._rows is None or self._rows[0] is not plan:
            mine, yours = plan.src_offsets, plan.dst_offsets
            if direction is Direction.PULL:
                mine, yours = yours, mine
            memory = self._memory
            here = descriptors(memory.base_address, mine, plan.sizes, memory.device)
            there = descriptors(peer.base_address, yours, plan.sizes, peer.device)
            self._rows = (plan, here, there)
        return self._rows[1:]


CONNECTOR = BareNixl
