"""Blocks for sequences that grow: as many as a request starts with, and one after the other then.

Nobody holds blocks for tokens that it may never come to: a request starts with those of its prompt
and of one block of tokens more, and gets another one right before the step that writes to it. Only
what can be prefilled again is let in like that (`can_resume`): who needs a block that there is not
may have to give back its own (`decode.preemption`). All else gets at once what it may come to need:
a model with an encoder, whose decoder's tokens no prefill takes, and a sequence that would come to
be too long a prompt for a prefill worker that is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from decode.schedule import DecodeRequest
from kvxfer.cache.footprint import blocks_needed, has_encoder
from kvxfer.control.session import Peer
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.residency import ResidencyState

Counts = list[int]
"""Numbers of blocks, group by group."""


def blocks_for(request: DecodeRequest, num_new: int) -> Counts:
    """Of a request that has said `num_new` tokens."""
    return blocks_needed(request.specs, len(request.generate.tokens), num_new, step_tokens=1)


def can_resume(request: DecodeRequest, prefills: Sequence[Peer]) -> bool:
    """Whether each of `prefills` takes it as a prompt however much it has said."""
    longest = len(request.generate.tokens) + request.generate.max_new_tokens
    limits = [peer.facts.max_model_len for peer in prefills if peer.facts is not None]
    return not has_encoder(request.specs) and all(longest <= limit for limit in limits)


def blocks_to_start(request: DecodeRequest) -> Counts:
    """What it is let in with."""
    most = request.generate.max_new_tokens
    if request.can_resume:
        head_start = max(spec.block_size for spec in request.specs)
        most = min(most, request.num_resumed + head_start)
    return blocks_for(request, most)


def reserve(others: Iterable[DecodeRequest], num_groups: int) -> Counts:
    """Blocks that stay free when another request is let in: one of each group for each of `others`
    that may need one there, so that who is let in is not preempted right away."""
    found = [0] * num_groups
    for request in others:
        if not request.can_resume:
            continue
        most = blocks_for(request, request.generate.max_new_tokens)
        for group, (held, end) in enumerate(zip(request.blocks, most, strict=True)):
            found[group] += len(held) < end
    return found


class BlockSupply:
    """Of a worker's cache. Control thread only."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts

    def extend(self, request: DecodeRequest) -> bool:
        """Give it what its next step writes to; False, and nothing has changed, where there is too
        little."""
        lacking = _lacking(request)
        pools = self._parts.engine.pools
        if self._parts.residency.state is ResidencyState.DRAINING:
            # What shall go is held back from who is let in, not from who has to end before it can.
            pools.lift(pools.missing(lacking))
        if not pools.can_allocate(lacking):
            return False
        if not any(lacking):
            return True
        pairs = zip(request.blocks, pools.allocate(lacking), strict=True)
        request.blocks = [[*held, *more] for held, more in pairs]
        return True

    def grows_for(self, request: DecodeRequest) -> bool:
        """Whether the cache is growing, or begins to, since the next step lacks a block."""
        growth = self._parts.growth
        growth.request_for(_lacking(request))
        return not growth.is_idle


def _lacking(request: DecodeRequest) -> Counts:
    """Blocks that its next step writes to, and that it does not hold."""
    wanted = blocks_for(request, len(request.output))
    return [max(0, n - len(held)) for n, held in zip(wanted, request.blocks, strict=True)]
