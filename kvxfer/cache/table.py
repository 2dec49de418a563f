"""One sequence's blocks in one group of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.errors import CacheError


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Entry i, the tokens [i·N, (i + 1)·N), lies in block `blocks[i % len(blocks)]`.

    A group that keeps all tokens has a block for each entry. One with a window has as many as
    `KVCacheSpec.blocks_held` says: when an entry takes over a block, no later token sees what was
    in it.
    """

    blocks: Sequence[int]

    def at(self, entry: int) -> int:
        return self.blocks[entry % len(self.blocks)]

    def ids(self, entries: range) -> list[int]:
        """The blocks of neighbouring entries. Raises CacheError for more than can be held at once:
        two would lie in one block."""
        if len(entries) > len(self.blocks):
            raise CacheError(f"{len(entries)} entries of a table of {len(self.blocks)} blocks")
        first = entries.start % len(self.blocks) if entries else 0
        wrapped = first + len(entries) - len(self.blocks)
        return [*self.blocks[first : first + len(entries)], *self.blocks[: max(0, wrapped)]]
