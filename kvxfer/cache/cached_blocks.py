"""The blocks of one group whose contents are worth keeping, and the order in which they go.

Not thread-safe, like the allocator that owns it.
"""

from __future__ import annotations

from collections.abc import Sequence


class CachedBlocks:
    """A key stands for one content and has one block. A block is *idle* while nobody holds it:
    only then may it be evicted, the one that has been idle longest first.

    Who holds what, the allocator knows; it says so by `rest` and `wake`.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: dict[int, None] = {}
        """In the order in which they became so."""

    @property
    def blocks(self) -> frozenset[int]:
        return frozenset(self._key_of)

    @property
    def idle(self) -> tuple[int, ...]:
        """The next to be evicted first."""
        return tuple(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def find_first(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of `keys`, up to the first that has none."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, block: int, key: bytes) -> None:
        """`block`, which somebody holds, has the content of `key`. Nothing changes where either is
        known already: equal contents in two blocks are of no use."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def rest(self, block: int) -> None:
        """Nobody holds `block` any more."""
        self._idle[block] = None

    def wake(self, block: int) -> None:
        """Somebody holds `block` from now on."""
        self._idle.pop(block, None)

    def evict(self) -> int:
        """Forget the block that has been idle longest; there is one."""
        block = next(iter(self._idle))
        self.forget(block)
        return block

    def forget(self, block: int) -> bool:
        """The content of `block` is to be lost, or may be; whether it was idle."""
        key = self._key_of.pop(block, None)
        if key is None:
            return False
        del self._block_of[key]
        was_idle = block in self._idle
        self.wake(block)
        return was_idle

    def forget_from(self, limit: int) -> list[int]:
        """Forget every block at or above `limit`, held or not; those that were idle."""
        return [block for block in sorted(self._key_of) if block >= limit and self.forget(block)]
