"""What workers tell of themselves when they meet (`control.messages.Hello`, `Welcome`)."""

from __future__ import annotations

import msgspec

from kvxfer.cache.layout import CacheGeometry
from kvxfer.transfer.regions import Region


class RankFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach the cache of one rank."""

    base_address: int
    description: bytes
    """The connectors' sealed descriptions of their agents and of the worker's regions."""
    invitations: list[bytes]
    """One-time rights to connect, for this Hello or Welcome: one for each rank of the peer."""

    def invitation(self, rank: int) -> bytes:
        """The one for `rank` of whom this was said to."""
        return self.invitations[rank] if rank < len(self.invitations) else b""


class WorkerFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What two workers compare and need of each other before KV may flow."""

    role: str
    worker_id: str
    incarnation: str
    """One life of the process: a restarted worker has another."""
    model: str
    """Fingerprint of config and weights."""
    geometry: CacheGeometry
    """Of each rank: its share of the heads, at the same offsets in all."""
    ranks: list[RankFacts]
    """As many as the tensor-parallel size."""
    lanes: list[str]
    """Every connector and direction on offer (`kvxfer.transfer.lanes.Lane`)."""
    local_lanes: list[str]
    """Of those, the ones that are for workers of one host only."""
    host: str
    """Identity of the running kernel: the same in all containers of a host."""
    device: str
    device_id: str
    """The GPU's name and UUID, '' for host memory."""
    tests_lanes: bool
    """Whether it will try lanes out before one is chosen; both sides must."""
    regions: list[Region]
    """Of each rank, the same in all."""
    generation: int
    epoch: int
    """Revocations so far."""
    max_model_len: int
    """Tokens of the longest sequence that it takes."""

    @property
    def tensor_parallel_size(self) -> int:
        return len(self.ranks)
