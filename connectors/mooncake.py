"""Mooncake's transfer engine, over its TCP transport: within a host and between hosts.

Optional: `pip install 'kvxfer[mooncake]'`, and Debian's libibverbs1, without which the engine does
not load even where there is no RDMA. Engines meet peer to peer: no etcd, no metadata server.

What the engine does, as measured with mooncake-transfer-engine-non-cuda 0.3.13.post1 (more in
`mooncake_engine` and `mooncake_session`):
- The owner's engine looks every request up among what it has registered, so a range that was
  deregistered is refused at once, whoever asks. What it is already writing or sending goes on.
- Threads of the engine move the bytes on both sides: neither worker needs to poll for its peer.
- A completed descriptor is visible at its destination: a WRITE is acknowledged.
- What is kept of a peer that was lost are 3 sockets, until the engine ends: a new one is begun when
  that is worth it (`wear`), and the old one ended within 50 ms.

What it cannot do:
- Stop a transfer. A ticket ends when its descriptors have, also after `disconnect`; with a stopped
  peer that is when it goes on or ends.
- Tell one life of a process from the next: a peer is a host and a port, memory is an address. A
  peer has to show a mark of its own when it is met, and after each failure. One that dies, whose
  port (one of some 2,000) another kvxfer worker takes before the next transfer is begun, and which
  has memory registered at the very same address, would be taken for it.
- Keep strangers out: the ports take anybody's requests. Only for networks whose hosts are trusted.
- RDMA, through kvxfer: nothing but TCP was tried, so nothing else is switched on.
- GPU memory, with the package for machines without CUDA. `mooncake-transfer-engine` claims it; that
  was not tried.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from connectors.mooncake_engine import load_engine, own_host, start_engine
from connectors.mooncake_session import MARK_BYTES, Session, Told, Transfer
from kvxfer.errors import ConnectorError, UsageError
from kvxfer.transfer.agent import Agent
from kvxfer.transfer.agent_connector import AgentConnector
from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.reach import RemotePeer
from kvxfer.transfer.regions import Region


class MooncakeAgent(Agent):
    """An engine of its own, one registration a region."""

    def __init__(self, name: str, memory: MemoryWindow) -> None:
        if memory.device != "cpu" and not load_engine().SUPPORT_CUDA:
            reason = "this package of Mooncake moves host memory only: mooncake-transfer-engine"
            raise UsageError("device", memory.device, reason)
        self._memory = memory
        self._engine, self._address = start_engine(own_host())
        self._mark = np.frombuffer(os.urandom(MARK_BYTES), dtype=np.uint8).copy()
        self._register(self._mark.ctypes.data, MARK_BYTES)
        self._sessions: dict[str, Session] = {}

    def register(self, region: Region) -> Region:
        self._register(self._memory.base_address + region.offset, region.size)
        return region

    def deregister(self, handle: Region) -> None:
        if code := self._engine.unregister_memory(self._memory.base_address + handle.offset):
            raise ConnectorError(f"Mooncake does not deregister {handle} (code {code})")

    def metadata(self, regions: Sequence[Region]) -> bytes:
        """Where the engine is; it needs to be told of no region."""
        told = Told(self._address, self._mark.ctypes.data, self._mark.tobytes())
        return msgspec.msgpack.encode(told)

    def add_peer(self, remote: RemotePeer, metadata: bytes) -> None:
        """Whether there is such a peer shows later: a transfer that is begun waits for that."""
        try:
            told = msgspec.msgpack.decode(metadata, type=Told)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConnectorError(f"description of agent {remote.agent}: {error}") from error
        known = self._sessions.get(remote.agent)
        if known is None or known.told != told or known.has_failed:
            self._sessions[remote.agent] = Session(self._engine, told)

    def remove_peer(self, agent: str) -> None:
        """The engine keeps its sockets to it."""
        self._sessions.pop(agent, None)

    def start(self, direction: Direction, remote: RemotePeer, plan: TransferPlan) -> Transfer:
        session = self._sessions[remote.agent]
        if session.has_failed:
            session = self._sessions[remote.agent] = Session(self._engine, session.told)
        ours, theirs = plan.src_offsets, plan.dst_offsets
        if direction is Direction.PULL:
            ours, theirs = theirs, ours
        return Transfer(
            session,
            direction,
            (ours + self._memory.base_address).tolist(),
            (theirs + remote.base_address).tolist(),
            plan.sizes.tolist(),
        )

    def is_finished(self, handle: Transfer) -> bool:
        return handle.advance()

    def progress(self) -> None:
        """The engine's threads serve peers."""

    def _register(self, address: int, size_bytes: int) -> None:
        if code := self._engine.register_memory(address, size_bytes):
            what: Any = f"{size_bytes} bytes at {address:#x}"
            raise ConnectorError(f"Mooncake does not register {what} (code {code})")


class MooncakeConnector(AgentConnector):
    """Moves bytes with Mooncake."""

    agent_class = MooncakeAgent

    @classmethod
    def why_missing(cls) -> str:
        """Loads the engine: a package that is there may still lack a library."""
        try:
            load_engine()
        except UsageError as error:
            return error.reason
        return ""


CONNECTOR = MooncakeConnector
