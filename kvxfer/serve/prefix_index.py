"""Which workers have the KV of which beginnings of prompts, as far as a router can know.

It knows what it sent where; workers may have dropped their blocks since, so that what is found here
is a guess that costs time where it is wrong, never a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_BLOCKS = 1 << 16
MAX_HOLDERS = 8
"""Workers remembered for each block: the newest."""


class PrefixIndex:
    """Hashes of blocks (`kvxfer.cache.prefix_cache.block_hashes`) → who has them as the last ones.
    At most `max_blocks`: those that were used longest ago are forgotten."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def lookup(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """How many of the first blocks, without a gap, each worker has; of those that have any."""
        found: dict[str, int] = {}
        for count, one in enumerate(hashes):
            holders = self._holders.get(one, ())
            going = [name for name in holders if found.get(name, 0) == count]
            if not going:
                break
            found.update(dict.fromkeys(going, count + 1))
        return found

    def insert(self, hashes: Sequence[bytes], worker: str) -> None:
        """`worker` has, or is about to have, these blocks of one prompt, from its first on."""
        for one in reversed(hashes[: self._max_blocks]):  # the first is the newest: found by most
            others = [name for name in self._holders.pop(one, ()) if name != worker]
            self._holders[one] = (*others[-(MAX_HOLDERS - 1) :], worker)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)
