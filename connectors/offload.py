"""Storage: blocks are put in tiers of host memory and disk, and brought back, by whoever may.

Two things move, by the same threads, through the same slots (`offload_store`, `offload_slots`):

    store, load    blocks of this worker's window, under keys that stand for their content: what a
                   prefix cache has no room for, for as long as there is room here
    submit         a hand-over by way of storage: a push puts parcels in slots of ours, which the
                   peer reads into its window; for a pull the peer puts them in slots of its own

So a peer never touches our memory, nor we its: each reads the other's tiers, through descriptors
that were handed over for reading only, and believes of them what their digests prove. A ticket is
complete when the other side has said that the bytes are in its window, or they are in ours.

Tiers are set by environment variables (`offload_tiers`); by default 64 MiB of host memory. With a
host tier of 0 and a directory all goes over the disk.

What follows:
- Both ends need to poll, in both directions.
- Only threads of its own touch a process's window, and `deregister` waits for those: memory may
  be unmapped after it, whatever a stale, stopped or dead peer does.
- Of who fails, or is killed, the other side's transfers end with an error.
Never run on: GPU memory (refused), hosts that share a file system (refused: one host only).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import cast

from connectors.offload_agent import OffloadAgent
from connectors.offload_parcels import Extents
from kvxfer.errors import ConnectorError, RegionError
from kvxfer.transfer.agent_connector import AgentConnector
from kvxfer.transfer.connector import MemoryWindow, Where


class OffloadConnector(AgentConnector):
    """Moves bytes by way of slots."""

    agent_class = OffloadAgent
    renews_agent = False  # a stale peer reads slots, and asks for what is registered

    def exercise(self, scratch: MemoryWindow) -> ExitStack:
        """It takes nothing of a device."""
        return ExitStack()

    @property
    def reads_from(self) -> frozenset[Where]:
        return frozenset({Where.HOST})

    @property
    def is_busy(self) -> bool:
        return self._offload().is_busy

    def invite(self) -> bytes:
        return self._offload().guests.invitations.issue()

    def connect(
        self, peer: str, base_address: int, description: bytes, invitation: bytes = b""
    ) -> None:
        agent = self._offload()
        known = self._peers.get(peer)
        if known is not None and agent.has_lost(known.agent):
            self.disconnect(peer)
        with agent.invited_with(invitation):
            super().connect(peer, base_address, description)

    def store(self, blocks: Mapping[bytes, Extents]) -> int:
        """Keep blocks of our window, by key: a ticket, which ends in an error where some could not
        be kept. Their bytes must stay as they are until then. Raises ConnectorError, nothing
        kept."""
        return self._took_off("", self._offload().start_storing(self._checked(blocks)))

    def load(self, blocks: Mapping[bytes, Extents]) -> int:
        """Bring blocks back to our window, whoever stored them: a ticket, which ends in an error
        where one is missing. What of its bytes was there has changed then, and counts for nothing.
        """
        return self._took_off("", self._offload().start_loading(self._checked(blocks)))

    def has(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are likely to be there."""
        store = self._offload().store
        return next((n for n, key in enumerate(keys) if not store.has(key)), len(keys))

    def close(self) -> None:
        """Waits for what is being carried, which may be written to a disk."""
        if self._is_closed:
            return
        agent = self._offload()
        with ExitStack() as release:
            release.callback(agent.close)
            for known in self._peers.values():
                agent.lose(known.agent, "it was closed")
            super().close()

    def _leave(self, name: str, reason: str) -> None:
        """Also: the agent is not served any more."""
        self._offload().guests.forget(name)
        super()._leave(name, reason)

    def _checked(self, blocks: Mapping[bytes, Extents]) -> Mapping[bytes, Extents]:
        limit = self._offload().store.slot_bytes
        for key, extents in blocks.items():
            if not 0 < extents.total_bytes <= limit or (extents.sizes < 1).any():
                raise ConnectorError(f"block {key.hex()}: must have 1 to {limit} bytes")
            try:
                self._regions.check_covers(extents.offsets, extents.sizes, f"block {key.hex()}")
            except RegionError as error:
                raise ConnectorError(str(error)) from error
        return blocks

    def _offload(self) -> OffloadAgent:
        self._check_open()
        return cast(OffloadAgent, self._epoch.agent)


CONNECTOR = OffloadConnector
