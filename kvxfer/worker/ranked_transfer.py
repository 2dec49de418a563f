"""What the ranks of one worker move together: each its part, over the group's transfer line.

Tickets are numbered through all ranks: rank + size × the rank's own ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvxfer.control.facts import RankFacts
from kvxfer.errors import CacheError
from kvxfer.memory.steps import Steps
from kvxfer.transfer.connector import Connector, TicketResult
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.plan_parts import MoveParts
from kvxfer.transfer.rank_plans import RankMove
from kvxfer.transfer.regions import Region
from kvxfer.worker.rank_transfer import Growth, Submitted
from kvxfer.worker.ranks import RankGroup


class RankedTransfer:
    """A WorkerTransfer over a group, which stays the caller's. Raises as `RankGroup.call`, too."""

    def __init__(
        self, group: RankGroup, connectors: Sequence[str], base_addresses: Sequence[int]
    ) -> None:
        """`connectors`: those that every rank has opened."""
        self._group = group
        self._names = list(connectors)
        self.base_addresses = list(base_addresses)

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def connectors(self) -> Mapping[str, Connector]:
        own = self._group.host.transfer.connectors
        return {name: own[name] for name in self._names}

    def invite(self, count: int) -> list[list[bytes]]:
        return self._group.call("invite", count)

    def growing(self, num_blocks: Sequence[int]) -> Steps[Growth]:
        """In one step: the ranks grow at the same time."""
        yield from ()
        grown = self._group.grow(num_blocks)
        first = self._group.host.newest_growth
        updates = tuple(one.update for one in grown)
        return Growth(
            first.extension, first.regions, updates, tuple(one.description for one in grown)
        )

    def release(self, regions: Sequence[Region], release: Callable[[], object]) -> object:
        raise CacheError(NOT_RANKED)

    def bury(self) -> None:
        """Nothing was ever retired."""

    def revoke(self, left: Sequence[Region], epoch: int) -> list[bytes]:
        return self._group.call("revoke", list(left), epoch)

    def retire(self, kept: frozenset[int]) -> None:
        self._group.call("retire", kept)

    def connect(self, peer: str, ranks: Sequence[RankFacts]) -> frozenset[str]:
        return self._common(self._group.call("connect", peer, list(ranks)))

    def renew(self, peer: str, ranks: Sequence[RankFacts]) -> frozenset[str]:
        return self._common(self._group.call("renew", peer, list(ranks)))

    def disconnect(self, peer: str) -> None:
        self._group.call("disconnect", peer)

    def submit(self, peer: str, lane: Lane, moves: Sequence[RankMove]) -> list[Submitted]:
        parts = [MoveParts.of(move) for move in moves]
        own = partial(self._group.host.transfer.submit, peer, lane, moves)
        by_rank = self._group.call("submit", peer, lane, parts, own=own)
        return [
            one if one.error else Submitted(self._ours(rank, one.ticket))
            for rank, found in enumerate(by_rank)
            for one in found
        ]

    def poll(self) -> list[TicketResult]:
        return [
            TicketResult(self._ours(rank, one.ticket), one.error)
            for rank, ended in enumerate(self._group.call("poll"))
            for one in ended
        ]

    def write_pattern(self, blocks: Sequence[int], seed: int) -> None:
        self._group.call("write_pattern", list(blocks), seed)

    def erase_pattern(self, blocks: Sequence[int]) -> None:
        self._group.call("erase_pattern", list(blocks))

    def check_pattern(self, blocks: Sequence[int], seed: int) -> bool:
        return all(self._group.call("check_pattern", list(blocks), seed))

    def close(self) -> None:
        self._group.call("close_connectors")

    def _ours(self, rank: int, ticket: int) -> int:
        return rank + self._group.size * ticket

    def _common(self, reached: Sequence[frozenset[str]]) -> frozenset[str]:
        return frozenset.intersection(*reached)


NOT_RANKED = "tensor_parallel_size: a cache in several ranks gives no memory back"
