"""What a simulated cluster is made of: the options that its workers, links and caches come from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvxfer.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterShape:
    """All workers of a role are alike. Raises UsageError where it can be no cluster."""

    prefill: int
    decode: int
    routers: int = 1
    """Each of them with an equal part of the requests."""
    cores: int = 0
    """That all processes share, the router and the client too; 0: each thread has one."""
    chunk_tokens: int = 256
    max_num_seqs: int = 16
    max_num_queued: int = 1024
    block_size: int = 16
    prefill_blocks: int
    decode_blocks: int
    is_elastic: bool = False
    low_watermark: float = 0.1
    workers_per_link: int = 1
    fabric_bytes_per_s: float = 0.0
    """0: no bound."""
    peer_timeout_s: float = 5.0
    """A sixth of it is between two heartbeats."""
    max_concurrency: int = 0
    """Of the client; 0: any number."""

    def __post_init__(self) -> None:
        positive = (
            *("prefill", "decode", "routers", "chunk_tokens", "max_num_seqs", "max_num_queued"),
            *("block_size", "prefill_blocks", "decode_blocks", "workers_per_link"),
        )
        for name, least in [*((n, 1) for n in positive), ("cores", 0), ("max_concurrency", 0)]:
            if getattr(self, name) < least:
                raise UsageError(name, getattr(self, name), f"must be at least {least}")
        if not 0 < self.peer_timeout_s < math.inf:
            raise UsageError("peer_timeout_s", self.peer_timeout_s, "must be more than 0")
        if not 0 <= self.fabric_bytes_per_s < math.inf:
            raise UsageError("fabric_bytes_per_s", self.fabric_bytes_per_s, "must be at least 0")
        if not 0 <= self.low_watermark < 1:
            raise UsageError("low_watermark", self.low_watermark, "must be in [0, 1)")
