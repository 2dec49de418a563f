"""What both ends of a trial of lanes agree on: how much is moved, and between which blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvxfer.cache.layout import GroupGeometry
from kvxfer.control.lane_messages import LaneTrial
from kvxfer.control.session import Peer
from kvxfer.transfer.plan import CacheSide, TransferPlan, plan_transfer
from kvxfer.transfer.regions import RegionSet
from kvxfer.worker.assembly import WorkerParts

NUM_TRANSFERS = 3
"""Of each lane; the quickest counts. The first ones over a new lane are slow."""
FIRST_SHARE = 16
"""One part in so many is moved first: all of it only where that does not take long."""
LONG_NS = 250_000_000
"""What takes longer is not moved again."""
HOST_BYTES = 8 << 20
GPU_BYTES = 256 << 20
"""Enough for a fraction of a millisecond at full rate."""
SHARE = 4
"""A trial takes at most one in so many of the free blocks."""


def first_group(parts: WorkerParts) -> GroupGeometry:
    return parts.engine.cache.geometry.groups[0]


def trial_seed(trial_id: str) -> int:
    """Another pattern for each trial, so that none is mistaken for what was there before."""
    return int.from_bytes(trial_id.encode()[:4], "little")


def num_tokens(ours: GroupGeometry, theirs: GroupGeometry, num_free: int, device: str) -> int:
    """Tokens to move: whole blocks of both sides, 0 where too few are free."""
    step = math.lcm(ours.spec.block_size, theirs.spec.block_size)
    wanted = (HOST_BYTES if device == "cpu" else GPU_BYTES) // ours.spec.block_bytes
    blocks = max(1, min(wanted, num_free // SHARE))
    tokens = max(step, blocks * ours.spec.block_size // step * step)
    return tokens if tokens // ours.spec.block_size <= num_free else 0


def first_tokens(ours: GroupGeometry, theirs: GroupGeometry, tokens: int) -> int:
    """Of a trial's `tokens` those that are moved first."""
    step = math.lcm(ours.spec.block_size, theirs.spec.block_size)
    return max(step, tokens // FIRST_SHARE // step * step)


def why_not(ours: GroupGeometry, theirs: GroupGeometry, trial: LaneTrial) -> str:
    """Why a peer cannot have meant `trial`, or ''."""
    if trial.num_tokens < 1 or trial.num_tokens % math.lcm(
        ours.spec.block_size, theirs.spec.block_size
    ):
        return f"{trial.num_tokens} tokens are no whole blocks"
    if len(trial.blocks) * theirs.spec.block_size != trial.num_tokens:
        return f"{len(trial.blocks)} blocks are not those of {trial.num_tokens} tokens"
    if len(set(trial.blocks)) != len(trial.blocks):
        return "names a block twice"
    if not all(0 < block < theirs.capacity_blocks for block in trial.blocks):
        return "names the null block or one beyond the capacity"
    return ""


def trial_plan(
    source: tuple[GroupGeometry, RegionSet, Sequence[int]],
    peer: Peer,
    blocks: Sequence[int],
    tokens: int,
    *,
    from_peer: bool = False,
) -> TransferPlan:
    """Between our blocks and the `blocks` of `peer`. Raises PlanError, RegionError."""
    assert peer.facts is not None
    ours = CacheSide(*source)
    theirs = CacheSide(peer.facts.geometry.groups[0], peer.regions, blocks)
    ends = (theirs, ours) if from_peer else (ours, theirs)
    return plan_transfer(*ends, range(tokens))
