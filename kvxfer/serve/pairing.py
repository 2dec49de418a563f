"""Which (prefill, decode) pair gets a prompt: the one that is likely to be quickest. Pure.

The cost of a pair is an estimate, in seconds, of what stands between the prompt and its end:

| seconds      | are                                         | and come from                     |
| ---          | ---                                         | ---                               |
| queue at     | tokens that wait there to be computed       | Status `prefill_tokens_queued` of |
| prefill      | / tokens a second                           | others, our own since; Status     |
|              |                                             | `prefill_tokens_per_s`            |
| its prefill  | tokens of the prompt that are not cached    | the router's `PrefixIndex`; as    |
|              | there / tokens a second                     | above                             |
| hand-over    | bytes of KV that decode does not have       | the specs in WorkerFacts, the     |
|              | / bytes a second                            | index; Status `lane_gbps NAME`    |
| queue at     | until one that comes now gets blocks        | Status `queue_wait_s`             |
| decode       |                                             |                                   |
| its decoding | tokens it may generate x sequences there    | Status `requests` of others, our  |
|              | / tokens a second: theirs come between its  | own; Status `decode_tokens_per_s` |
| want of      | BLOCKS_WAIT_S where fewer blocks are free,  | Status `blocks_free`,             |
| blocks       | or can be had, than it needs                | `prefix_cache_blocks`, budget     |

Prefill and hand-over overlap in truth, and so do steps of a batch: what counts is which pair is
better, not by how much. Pairs that are nearly as good count as equal, and one of them is taken by
chance, so that load spreads where nothing else decides.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

BLOCKS_WAIT_S = 10.0
"""Until others have ended: how long that is, nobody knows."""
UNMET_S = 1.0
"""Decode has not met this prefill worker yet: it would take another one, or wait."""
NEAR_SHARE, NEAR_S = 0.1, 0.001
"""A pair is nearly as good as the best where it costs at most that share and that much more."""
MOST_OF_A_SIDE = 32
"""Workers of either side that are looked at, the quickest: all pairs of 500 and 500 idle workers
took the router 0.4 s, of 32 and 32 about 2 ms."""


@dataclass(frozen=True, slots=True)
class PrefillSide:
    """What a prompt would meet at one prefill worker."""

    tokens_queued: int
    tokens_uncached: int
    tokens_per_s: float
    lacks_blocks: bool

    @property
    def seconds(self) -> float:
        waits_s = BLOCKS_WAIT_S if self.lacks_blocks else 0.0
        return waits_s + (self.tokens_queued + self.tokens_uncached) / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class DecodeSide:
    """What it would meet at one decode worker. `num_bytes` of KV have to get there."""

    queue_wait_s: float
    num_requests: int
    max_new_tokens: int
    tokens_per_s: float
    num_bytes: int
    lacks_blocks: bool

    @property
    def seconds(self) -> float:
        waits_s = BLOCKS_WAIT_S if self.lacks_blocks else 0.0
        decodes_s = self.max_new_tokens * self.num_requests / self.tokens_per_s
        return waits_s + self.queue_wait_s + decodes_s


BytesPerSecond = Callable[[int, int], float]
"""Of the lane from a prefill to a decode worker, by their places; 0: they have not met."""


def pair_cost(prefill: PrefillSide, decode: DecodeSide, bytes_per_s: float) -> float:
    moves_s = decode.num_bytes / bytes_per_s if bytes_per_s > 0 else UNMET_S
    return prefill.seconds + decode.seconds + moves_s


def nearly(best: float) -> float:
    """What counts as equal to the cost of the best pair."""
    return best * (1 + NEAR_SHARE) + NEAR_S


def choose_pair(
    prefills: Sequence[PrefillSide],
    decodes: Sequence[DecodeSide],
    bytes_per_s: BytesPerSecond,
    chance: random.Random,
) -> tuple[int, int]:
    """Places of one of the pairs that are nearly best; neither list is empty.

    Those of which even the two sides alone cost more than that are not looked at, and none of more
    than the MOST_OF_A_SIDE quickest workers of a side, so that many cost little.
    """
    by_prefill = _quickest([side.seconds for side in prefills], chance)
    by_decode = _quickest([side.seconds for side in decodes], chance)
    best, found = float("inf"), list[tuple[float, int, int]]()
    for prefill_s, prefill in by_prefill:
        if prefill_s + by_decode[0][0] > nearly(best):
            break
        for decode_s, decode in by_decode:
            if prefill_s + decode_s > nearly(best):
                break
            rate = bytes_per_s(prefill, decode)
            cost = pair_cost(prefills[prefill], decodes[decode], rate)
            best = min(best, cost)
            if cost <= nearly(best):
                found.append((cost, prefill, decode))
    near = [pair for cost, *pair in found if cost <= nearly(best)]
    prefill, decode = chance.choice(near)
    return prefill, decode


def _quickest(seconds: Sequence[float], chance: random.Random) -> list[tuple[float, int]]:
    """With their places, in order; which of equals are among them is by chance."""
    if len(seconds) <= MOST_OF_A_SIDE:
        return sorted((cost, at) for at, cost in enumerate(seconds))
    drawn = ((cost, chance.random(), at) for at, cost in enumerate(seconds))
    return [(cost, at) for cost, _, at in heapq.nsmallest(MOST_OF_A_SIDE, drawn)]


def choose_one(seconds: Sequence[float], chance: random.Random) -> int:
    """The place of one that is nearly best, where only one side is to be chosen."""
    best = min(seconds)
    return chance.choice([at for at, cost in enumerate(seconds) if cost <= nearly(best)])
