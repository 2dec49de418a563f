"""A transfer that an endpoint started, as its engine holds it, and how one is planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvxfer.cache.layout import GroupGeometry
from kvxfer.errors import ConnectorError, DeadlineExceeded, PlanError
from kvxfer.transfer.endpoint_messages import HeadShard
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.plan import CacheSide, TransferPlan, plan_transfer
from kvxfer.transfer.regions import RegionSet

POLL_INTERVAL_S = 0.0002

BlocksOf = tuple[int, frozenset[int]]
"""A group, and blocks of our own in it."""

Selection = tuple[range | None, range | None]
"""Tokens and layers; None for all that both sides have."""


class Ticket:
    """Of one `push` or `pull`. Until it is `done` the blocks on both sides are in use: there is no
    cancel. Its endpoint's thread alone may `wait`; any may look."""

    def __init__(
        self, poll: Callable[[], object], peer: str, lane: Lane, plan: TransferPlan, uses: BlocksOf
    ) -> None:
        self.peer = peer
        self.lane = lane
        self.num_bytes = plan.total_bytes
        self.uses = uses
        self._plan = plan
        self._poll = poll
        self.done = False
        """As of the last poll. Then, without an error, every byte is visible at its destination."""
        self.error: str | None = None
        """Why the bytes must not be used, or None."""

    @property
    def num_descriptors(self) -> int:
        """Runs of bytes, contiguous on both sides; not counted until it is asked for."""
        return self._plan.num_runs

    def wait(self, timeout_s: float) -> None:
        """Poll the endpoint until it is done. Raises ConnectorError where it failed,
        DeadlineExceeded where it goes on: so does the transfer."""
        deadline_s = time.monotonic() + timeout_s
        while not self.done:
            self._poll()
            if self.done:
                break
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(
                    f"transfer with {self.peer} by {self.lane}: not done in {timeout_s:g} s; its "
                    f"blocks stay in use"
                )
            time.sleep(POLL_INTERVAL_S)
        if self.error is not None:
            raise ConnectorError(f"transfer with {self.peer} by {self.lane}: {self.error}")

    def end(self, error: str | None) -> None:
        """Called by the endpoint."""
        self.error = error  # first: another thread may look
        self.done = True


@dataclass(frozen=True, slots=True)
class BlockSide:
    """One end of a transfer within one group."""

    name: str
    geometry: GroupGeometry
    regions: RegionSet
    shard: HeadShard
    first_block: int

    def at(self, blocks: Sequence[int], heads: range | None) -> CacheSide:
        """Raises PlanError for what is no block that KV may be in."""
        found = np.asarray(blocks)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise PlanError(f"{self.name}: blocks {blocks!r} are no list of numbers")
        wrong = found[(found < self.first_block) | (found >= self.geometry.capacity_blocks)]
        if len(wrong):
            why = "is the null block" if wrong[0] == 0 else "is not among its blocks"
            limits = f"{self.first_block} to {self.geometry.capacity_blocks - 1}"
            raise PlanError(f"{self.name}: block {wrong[0]} {why}, {limits}")
        first_head, held = self.shard.first_head, self.geometry.spec.num_kv_heads
        mine = range(first_head, first_head + held)
        part = mine if heads is None else _common(mine, heads)
        ids = found.astype(np.int64).tolist()
        return CacheSide(self.geometry, self.regions, ids, 0, first_head, part)

    def num_tokens(self, blocks: Sequence[int]) -> int:
        return len(blocks) * self.geometry.spec.block_size


def plan_blocks(
    src: BlockSide,
    dst: BlockSide,
    blocks: tuple[Sequence[int], Sequence[int]],
    what: Selection,
    heads: range | None,
) -> TransferPlan:
    """Both block lists begin with token 0. Raises PlanError, RegionError; never plans nothing."""
    tokens, layers = what
    if heads is not None and heads.step != 1:
        raise PlanError(f"heads: {heads} must have step 1")
    ends = src.at(blocks[0], heads), dst.at(blocks[1], heads)
    if tokens is None:
        held = src.num_tokens(blocks[0]), dst.num_tokens(blocks[1])
        if held[0] != held[1]:
            text = f"{held[0]} at {src.name}, {held[1]} at {dst.name}"
            raise PlanError(f"blocks hold different numbers of tokens ({text}): say which tokens")
        tokens = range(held[0])
    plan = plan_transfer(*ends, tokens, layers)
    if not plan.total_bytes:
        both = f"{ends[0].heads} and {ends[1].heads}"
        raise PlanError(f"nothing to move: tokens {tokens}, layers {layers}, heads {both}")
    return plan


def _common(ours: range, theirs: range) -> range:
    start = max(ours.start, theirs.start)
    return range(start, max(start, min(ours.stop, theirs.stop)))
