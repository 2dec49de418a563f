"""What travels between the two halves of the connector, and between the two engines by the proxy.

scheduler ── Step, with each step ──▶ workers        kv_transfer_params: `Source.params`,
scheduler ◀── RankAddress, at start ── workers        read again by `Source.parse`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvxfer.errors import UsageError

MAX_TEXT = 512
MAX_RANKS = 1 << 10


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Where a rank of a producer is dialled, and in which life."""

    address: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Source:
    """Where the KV of a request waits."""

    engine_id: str
    request_id: str
    """The producer's."""
    lease_id: str
    ranks: tuple[RankAddress, ...]

    def params(self, num_tokens: int) -> dict[str, Any]:
        """kv_transfer_params of the producer's answer. Names that vLLM's NixlConnector has too
        mean what they mean there."""
        host, _, port = self.ranks[0].address.partition("#")[0].rpartition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": self.request_id,
            "remote_host": host.removeprefix("tcp://"),
            "remote_port": int(port) if port.isdecimal() else 0,
            "tp_size": len(self.ranks),
            "remote_num_tokens": num_tokens,
            "remote_lease_id": self.lease_id,
            "remote_ranks": [[rank.address, rank.incarnation] for rank in self.ranks],
        }

    @classmethod
    def parse(cls, params: Mapping[str, Any]) -> Source:
        """Raises UsageError for what no producer of ours has answered."""
        texts = {
            name: _text(f"kv_transfer_params.remote_{name}", params.get(f"remote_{name}"))
            for name in ("engine_id", "request_id", "lease_id")
        }
        ranks = params.get("remote_ranks")
        field_name = "kv_transfer_params.remote_ranks"
        if not isinstance(ranks, Sequence) or not 1 <= len(ranks) <= MAX_RANKS:
            raise UsageError(field_name, ranks, "is no list of the producer's ranks")
        found = []
        for rank in ranks:
            if not isinstance(rank, Sequence) or isinstance(rank, str) or len(rank) != 2:
                raise UsageError(field_name, rank, "is no [address, incarnation]")
            found.append(RankAddress(_text(field_name, rank[0]), _text(field_name, rank[1])))
        return cls(**texts, ranks=tuple(found))


def num_tokens_of(params: Mapping[str, Any]) -> int:
    """Tokens whose KV waits, by a producer's answer. Raises UsageError."""
    count = params.get("remote_num_tokens")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError("kv_transfer_params.remote_num_tokens", count, "is no number of tokens")
    return count


@dataclass(frozen=True, slots=True)
class Offer:
    """Producer: the KV of a finished request, kept for whoever claims it."""

    request_id: str
    lease_id: str
    num_tokens: int
    blocks: tuple[list[int], ...]
    """The scheduler's, group by group, from token 0 on; 0 where there is none any more."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Consumer: a request has arrived whose KV waits somewhere."""

    request_id: str
    source: Source


@dataclass(frozen=True, slots=True)
class Load:
    """Consumer: a claimed request has blocks now: bring the KV of tokens [start, end)."""

    request_id: str
    start: int
    end: int
    blocks: tuple[list[int], ...]
    """As Offer's."""


@dataclass(slots=True)
class Step:
    """What the scheduler's side tells every worker with one step, in this order."""

    offers: list[Offer] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)
    """Consumer's requests whose KV is not wanted, or not any more."""

    @property
    def is_empty(self) -> bool:
        return not (self.offers or self.claims or self.loads or self.drops)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_TEXT or not value.isprintable():
        raise UsageError(name, value, f"is no text of 1 to {MAX_TEXT} characters")
    return value
