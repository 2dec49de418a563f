"""KV that moves in the background, at a pace or as fast as it can, as a worker moves it.

A pace is kept piece by piece, in groups of layers as streaming hands them over (see
`prefill.streaming`); at full speed a piece is all layers of a chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import TransferError
from kvxfer.transfer.plan import TransferPlan
from kvxfer.worker.transfer_thread import Movement


@dataclass(frozen=True, slots=True)
class Piece:
    """Some layers of one set of blocks."""

    set_index: int
    layers: range


def pieces_of(spec: KVCacheSpec, num_sets: int, num_tokens: int, least_bytes: int) -> list[Piece]:
    """All layers of all sets, in the order of streaming; `least_bytes` of a piece."""
    set_bytes = spec.block_bytes // spec.block_size * num_tokens
    pieces = max(1, min(spec.num_layers, set_bytes // least_bytes))
    every = -(-spec.num_layers // pieces)
    return [
        Piece(index, range(first, min(first + every, spec.num_layers)))
        for index in range(num_sets)
        for first in range(0, spec.num_layers, every)
    ]


class Flow:
    """Control thread only. Every piece is planned when it is due, as a worker does."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        plan_of: Callable[[Piece], TransferPlan],
        move: Callable[[TransferPlan, Callable[[Movement], None]], None],
        gbps: float | None,
        in_flight: int,
    ) -> None:
        """`gbps` None: as fast as it can. At most `in_flight` pieces are under way, and never all
        of them: no destination is written twice at once."""
        self._plan_of = plan_of
        self._move = move
        self._bytes_s = math.inf if gbps is None else 1e9 * gbps
        self._most = max(1, min(in_flight, len(pieces) - 1))
        self._coming = itertools.cycle(pieces)
        self._left = len(pieces)
        self._submitted_bytes = 0
        self._flying = 0
        self.landed: list[tuple[float, int]] = []
        """(CLOCK_MONOTONIC, bytes) of each piece that arrived."""

    def pump(self, elapsed_s: float) -> None:
        """Submit what is due `elapsed_s` after the beginning."""
        while self._flying < self._most and self.wait_s(elapsed_s) <= 0:
            self._submit()

    def wait_s(self, elapsed_s: float) -> float:
        """Until the next piece is due; for ever while none may be begun."""
        if self._flying >= self._most:
            return math.inf  # else a flow behind its pace would keep the interpreter to itself
        return self._submitted_bytes / self._bytes_s - elapsed_s

    def drain(self) -> bool:
        """Begin nothing new but what has never moved; True once all has arrived."""
        while self._flying < self._most and self._left > 0:
            self._submit()
        return not self._flying

    def gbps(self, window: tuple[float, float]) -> float:
        """Of what arrived within `window`."""
        moved = sum(size for at_s, size in self.landed if window[0] <= at_s <= window[1])
        return moved / (window[1] - window[0]) / 1e9

    def _submit(self) -> None:
        plan = self._plan_of(next(self._coming))
        self._submitted_bytes += plan.total_bytes
        self._left -= 1
        self._flying += 1
        self._move(plan, self._ended)

    def _ended(self, movement: Movement) -> None:
        self._flying -= 1
        if movement.error is not None:
            raise TransferError(f"KV in the background: {movement.error}")
        self.landed.append((movement.end_ns / 1e9, movement.num_bytes))
