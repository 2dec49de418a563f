"""What one rank moves: its connectors, towards every rank of each peer, over its own cache.

A worker of one rank has one of these; one of several has one in each of its processes, and
`worker.ranked_transfer` in front of them. Both are what the transfer thread calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from kvxfer.cache.kv_cache import Extension, KVCache
from kvxfer.control.facts import RankFacts
from kvxfer.errors import KvxferError
from kvxfer.memory.steps import Steps, finished
from kvxfer.transfer.connector import Connector, Direction, TicketResult
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.multi import MultiConnector
from kvxfer.transfer.pattern import PatternHeads, check_pattern, erase, write_pattern
from kvxfer.transfer.rank_plans import RankMove, total_heads
from kvxfer.transfer.regions import Region
from kvxfer.transfer.shards import head_range


@dataclass(frozen=True, slots=True)
class Growth:
    """What an extension added, registered and ready to be told to peers. Descriptions are each
    rank's, in order."""

    extension: Extension
    regions: tuple[Region, ...]
    updates: tuple[bytes, ...]
    """The connectors' descriptions of `regions`."""
    descriptions: tuple[bytes, ...]
    """... and of everything registered."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """What became of one move: a ticket, or an error and no ticket."""

    ticket: int = 0
    error: str = ""


class WorkerTransfer(Protocol):
    """All of a worker's ranks. Every call but `invite` comes from one thread at a time; errors as
    `Connector`'s and `KVCache`'s."""

    @property
    def size(self) -> int: ...

    @property
    def connectors(self) -> Mapping[str, Connector]:
        """Rank 0's of those that every rank has."""

    @property
    def base_addresses(self) -> Sequence[int]:
        """Of each rank's cache."""

    def invite(self, count: int) -> list[list[bytes]]:
        """By rank, `count` one-time rights to connect. Any thread may call."""

    def growing(self, num_blocks: Sequence[int]) -> Steps[Growth]:
        """Extend every rank's cache, or wake it up, and register the new chunks: on all, or on
        none. Transfers may go on between the steps."""

    def release(self, regions: Sequence[Region], release: Callable[[], object]) -> object:
        """Deregister `regions`, then `release` their memory."""

    def bury(self) -> None:
        """As `KVCache.bury`."""

    def revoke(self, left: Sequence[Region], epoch: int) -> list[bytes]:
        """As `Connector.revoke`; descriptions by rank."""

    def retire(self, kept: frozenset[int]) -> None:
        """As `Connector.retire`."""

    def connect(self, peer: str, ranks: Sequence[RankFacts]) -> frozenset[str]:
        """As `MultiConnector.connect`, of all ranks of a peer; names of the connectors that know
        them all."""

    def renew(self, peer: str, ranks: Sequence[RankFacts]) -> frozenset[str]: ...

    def disconnect(self, peer: str) -> None: ...

    def submit(self, peer: str, lane: Lane, moves: Sequence[RankMove]) -> list[Submitted]:
        """Each move is answered for, in any order; nothing is raised for one that is refused,
        since the others are under way."""

    def poll(self) -> list[TicketResult]: ...

    def write_pattern(self, blocks: Sequence[int], seed: int) -> None:
        """Fill `blocks` of the first group with `transfer.pattern`'s of the model's heads: each
        rank its own. On return the devices have done it."""

    def erase_pattern(self, blocks: Sequence[int]) -> None:
        """Zeros instead."""

    def check_pattern(self, blocks: Sequence[int], seed: int) -> bool:
        """Whether every byte is there, on every rank."""

    def close(self) -> None:
        """Deregister everything and release the transports."""


class RankTransfer:
    """A WorkerTransfer of one rank, of the `num_ranks` of a worker. Owns the registrations of
    `cache`; closes `connector`."""

    size = 1

    def __init__(
        self, connector: MultiConnector, cache: KVCache, rank: int = 0, num_ranks: int = 1
    ) -> None:
        self.cache = cache
        self.connector = connector
        self._rank, self._num_ranks = rank, num_ranks
        self._registered: tuple[Region, ...] = ()
        self._peer_sizes: dict[str, int] = {}

    @property
    def connectors(self) -> Mapping[str, Connector]:
        return self.connector.connectors

    @property
    def base_addresses(self) -> Sequence[int]:
        return [self.cache.buffer.base_address]

    def invite(self, count: int) -> list[list[bytes]]:
        return [[self.connector.invite() for _ in range(count)]]

    def grow(self, num_blocks: Sequence[int]) -> Growth:
        """All of `growing`."""
        return finished(self.growing(num_blocks))

    def growing(self, num_blocks: Sequence[int]) -> Steps[Growth]:
        cache = self.cache
        with ExitStack() as undo:
            if cache.is_asleep:
                extension = cache.wake()
                undo.callback(cache.sleep)
            else:
                extension = yield from cache.extending(num_blocks)
                undo.callback(cache.retract, extension)
            known = set(self._registered)
            chunks = [Region(chunk.offset, chunk.size) for chunk in cache.buffer.chunks]
            added = tuple(region for region in chunks if region not in known)
            self.connector.register(added)
            undo.callback(self.connector.deregister, added)
            registered = self._registered + added
            update = self.connector.describe(added)
            whole = self.connector.describe(registered)
            self._registered = registered
            undo.pop_all()
        return Growth(extension, added, (update,), (whole,))

    def retract(self, growth: Growth) -> None:
        """Take back the newest growth, which no peer was told of."""
        self._deregister(growth.regions)
        self.cache.retract(growth.extension)

    def release(self, regions: Sequence[Region], release: Callable[[], object]) -> object:
        self._deregister(regions)
        return release()

    def bury(self) -> None:
        self.cache.bury()

    def revoke(self, left: Sequence[Region], epoch: int) -> list[bytes]:
        return [self.connector.revoke(left, epoch)]

    def retire(self, kept: frozenset[int]) -> None:
        self.connector.retire(kept)

    def connect(self, peer: str, ranks: Sequence[RankFacts]) -> frozenset[str]:
        self._peer_sizes[peer] = len(ranks)
        return self._each(
            peer,
            ranks,
            lambda name, far: self.connector.connect(
                name, far.base_address, far.description, far.invitation(self._rank)
            ),
        )

    def renew(self, peer: str, ranks: Sequence[RankFacts]) -> frozenset[str]:
        return self._each(
            peer,
            ranks,
            lambda name, far: self.connector.renew(name, far.base_address, far.description),
        )

    def disconnect(self, peer: str) -> None:
        with ExitStack() as release:
            for rank in range(self._peer_sizes.pop(peer, 1)):
                release.callback(self.connector.disconnect, rank_name(peer, rank))

    def submit(self, peer: str, lane: Lane, moves: Sequence[RankMove]) -> list[Submitted]:
        """Of `moves` those that this rank starts."""
        found = []
        for move in moves:
            own, far = starter(move, lane.direction)
            if own != self._rank:
                continue
            try:
                ticket = self.connector.submit(rank_name(peer, far), lane, move.plan)
            except KvxferError as error:
                found.append(Submitted(error=str(error)))
            else:
                found.append(Submitted(ticket))
        return found

    def poll(self) -> list[TicketResult]:
        return self.connector.poll()

    def write_pattern(self, blocks: Sequence[int], seed: int) -> None:
        write_pattern(self.cache.views[0], blocks, seed, self._pattern_heads())
        self._synchronize()

    def erase_pattern(self, blocks: Sequence[int]) -> None:
        erase(self.cache.views[0], blocks)
        self._synchronize()

    def check_pattern(self, blocks: Sequence[int], seed: int) -> bool:
        return check_pattern(self.cache.views[0], blocks, seed, self._pattern_heads())

    def _pattern_heads(self) -> PatternHeads:
        total = total_heads(self.cache.geometry.specs[0], self._num_ranks)
        return PatternHeads(head_range(self._rank, self._num_ranks, total).start, total)

    def _synchronize(self) -> None:
        device = self.cache.buffer.driver.device
        if device != "cpu":
            import torch

            torch.cuda.synchronize(device)

    def close(self) -> None:
        if self._registered:
            self._deregister(self._registered)
        self.connector.close()

    def _deregister(self, regions: Sequence[Region]) -> None:
        self.connector.deregister(regions)
        gone = set(regions)
        self._registered = tuple(one for one in self._registered if one not in gone)

    def _each(
        self,
        peer: str,
        ranks: Sequence[RankFacts],
        learn: Callable[[str, RankFacts], frozenset[str]],
    ) -> frozenset[str]:
        reached = [learn(rank_name(peer, rank), far) for rank, far in enumerate(ranks)]
        return frozenset.intersection(*reached)


def starter(move: RankMove, direction: Direction) -> tuple[int, int]:
    """Of the two ranks of a move: who starts it, and the one at the other end."""
    ends = move.src_rank, move.dst_rank
    return ends if direction is Direction.PUSH else ends[::-1]


def rank_name(peer: str, rank: int) -> str:
    """What connectors call a rank of `peer`."""
    return f"{peer}#{rank}" if rank else peer
