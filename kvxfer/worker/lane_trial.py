"""What both ends of a trial of lanes agree on: how much is moved, and between which blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kvxfer.cache.layout import CacheGeometry, GroupGeometry
from kvxfer.cache.spec import GroupKind
from kvxfer.control.lane_messages import LaneTrial
from kvxfer.control.session import Peer
from kvxfer.transfer.rank_plans import RankMove, RankPlans, WorkerSide
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
"""Enough for a fraction of a millisecond at full rate. Of one rank."""
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


def trial_moves(
    parts: WorkerParts,
    own: Sequence[int],
    peer: Peer,
    theirs: Sequence[int],
    tokens: int,
    *,
    from_peer: bool = False,
) -> list[RankMove]:
    """The first `tokens`, between our blocks `own` and the blocks `theirs` of `peer`: of each pair
    of ranks that KV moves between. Raises PlanError, RegionError."""
    assert peer.facts is not None
    far, group = peer.facts, first_group(parts)
    near_end = _side(group, parts.engine.size, parts.growth.regions, own, tokens)
    theirs_too = far.geometry.groups[0], far.tensor_parallel_size, peer.regions, theirs
    far_end = _side(*theirs_too, tokens)
    source, target = (far_end, near_end) if from_peer else (near_end, far_end)
    whole = [range(group.spec.num_layers)]
    return RankPlans(source, target, tokens, [range(tokens)]).moves(whole)


def arrived_bytes(parts: WorkerParts, tokens: int) -> int:
    """What a trial of `tokens` brings to all our ranks."""
    spec = first_group(parts).spec
    return tokens // spec.block_size * spec.block_bytes * parts.engine.size


def _side(
    group: GroupGeometry, size: int, regions: RegionSet, blocks: Sequence[int], tokens: int
) -> WorkerSide:
    """The first group alone, of which a trial moves all tokens, seen again or not."""
    if group.spec.kind is not GroupKind.MLA:
        group = replace(group, spec=replace(group.spec, kind=GroupKind.FULL, window=0))
    taken = blocks[: tokens // group.spec.block_size]
    return WorkerSide(CacheGeometry((group,)), size, regions, [taken])
