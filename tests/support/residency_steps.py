"""A cache of several groups that grows, shrinks, sleeps, wakes and is packed at random, with every
byte checked after each step: one body, for host memory and for a GPU."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from kvxfer.cache.kv_cache import KVCache
from kvxfer.errors import CacheAwake, CacheSleeps, MemoryPinned, OutOfMemory

AWAKE = ["grow"] * 5 + ["shrink"] * 3 + ["sleep", "wake", "pack", "pack", "bury"]
ASLEEP = ["wake"] * 3 + ["bury"] * 2 + ["grow", "shrink", "sleep", "pack"]
REFUSALS = (OutOfMemory, CacheSleeps, CacheAwake, MemoryPinned)
LARGEST_BYTE = 251
"""A prime: the pattern of a block repeats nowhere that a layout does."""


class Contents:
    """What each block of a cache was last filled with: stamps[group][block]."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.stamps: list[list[int]] = [[] for _ in cache.geometry.groups]
        self._next = 0

    def follow(self) -> None:
        """Blocks that are gone have lost what was in them."""
        blocks = self.cache.committed_blocks
        for stamps, bound in zip(self.stamps, blocks, strict=True):
            del stamps[0 if self.cache.is_asleep else bound :]

    def fill(self) -> None:
        """Give each new block a content of its own."""
        for group, bound in enumerate(self.cache.committed_blocks):
            first = len(self.stamps[group])
            if first < bound:
                self._next += 1
                self.stamps[group] += [self._next] * (bound - first)
                for layer in range(len(self.cache.views[group])):
                    self._bytes(group, layer, first, bound).copy_(
                        self._expected(group, layer, first, bound)
                    )

    def check(self) -> None:
        """Every byte of every block of every group."""
        for group, stamps in enumerate(self.stamps):
            for layer in range(len(self.cache.views[group])):
                found = self._bytes(group, layer, 0, len(stamps))
                expected = self._expected(group, layer, 0, len(stamps))
                assert torch.equal(found, expected), f"group {group}, layer {layer}"

    def _bytes(self, group: int, layer: int, first: int, last: int) -> torch.Tensor:
        return self.cache.views[group][layer].view(torch.uint8)[first:last]

    def _expected(self, group: int, layer: int, first: int, last: int) -> torch.Tensor:
        shape = self._bytes(group, layer, first, last).shape
        device = self.cache.views[group][layer].device
        stamps = torch.tensor(self.stamps[group][first:last], device=device, dtype=torch.int32)
        blocks = torch.arange(first, last, device=device, dtype=torch.int32)
        start = blocks * 31 + layer * 7 + group * 13 + stamps * 57
        inside = torch.arange(shape[1:].numel(), device=device, dtype=torch.int32) % LARGEST_BYTE
        found = (start.view(-1, 1) + inside.view(1, -1)) % LARGEST_BYTE
        return found.to(torch.uint8).view(shape)


def check_chunks(cache: KVCache) -> None:
    """Chunks back the same prefix of each segment of a group, and nothing else; what is pinned is
    apart from them."""
    total = 0
    for group, blocks in zip(cache.geometry.groups, cache.committed_blocks, strict=True):
        prefixes = set()
        for segment in range(group.num_segments):
            start = end = group.segment_offset(segment)
            for chunk in cache.buffer.chunks:
                if start <= chunk.offset < start + group.segment_stride_bytes:
                    assert chunk.offset == end, "a hole in the committed prefix"
                    end = chunk.end
            assert end <= start + group.segment_stride_bytes, "a chunk of two segments"
            prefixes.add(end - start)
        (prefix,) = prefixes
        assert group.blocks_backed_by(prefix) == blocks
        total += prefix * group.num_segments
    assert total == cache.committed_bytes == sum(chunk.size for chunk in cache.buffer.chunks)
    ours = sorted((*cache.buffer.chunks, *cache.buffer.pinned))
    assert all(left.end <= right.offset for left, right in itertools.pairwise(ours))


def _step(cache: KVCache, step: str, bounds: Sequence[int], is_reachable: bool) -> None:
    if step == "grow":
        cache.extend(bounds)
    elif step == "shrink":
        cache.shrink(bounds, is_reachable=is_reachable)
    elif step == "sleep":
        cache.sleep(is_reachable=is_reachable)
    elif step == "wake":
        cache.wake()
    elif step == "pack":
        cache.defragment()
    else:
        cache.bury()


def walk(
    cache: KVCache,
    num_steps: int,
    chance: random.Random,
    before_step: Callable[[], None] = lambda: None,
    after_step: Callable[[], None] = lambda: None,
) -> Counter[str]:
    """Take `num_steps` steps from a cache of which one block of each group is committed; how many
    of each kind were done, and 'refused'. Nothing is pinned, or a tombstone, at the end.

    `before_step` may have the next step fail; a step that is refused has changed nothing.
    """
    contents, done = Contents(cache), Counter[str]()
    contents.fill()
    base = cache.buffer.base_address
    pointers = [[view.data_ptr() for view in group] for group in cache.views]
    for _ in range(num_steps):
        before_step()
        step = chance.choice(ASLEEP if cache.is_asleep else AWAKE)
        before = (cache.is_asleep, cache.committed_blocks)
        bounds = [chance.randint(1, group.capacity_blocks) for group in cache.geometry.groups]
        if chance.random() < 0.3:
            only = chance.randrange(len(bounds))  # the others stay where they are
            now = [max(1, n) for n in cache.committed_blocks]
            bounds = [n if i == only else now[i] for i, n in enumerate(bounds)]
        try:
            _step(cache, step, bounds, chance.random() < 0.2)
            done[step] += 1
        except REFUSALS:
            done["refused"] += 1
            assert (cache.is_asleep, cache.committed_blocks) == before
        contents.follow()
        check_chunks(cache)
        after_step()
        if not cache.is_asleep:
            contents.check()
            contents.fill()
            assert [[view.data_ptr() for view in group] for group in cache.views] == pointers
        assert cache.buffer.base_address == base
    cache.bury()
    return done
