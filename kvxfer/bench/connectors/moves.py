"""What the two ends of `kvxfer bench connectors` say besides those of other transfer benches."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.transfer.connector import Direction

STREAM_TIMEOUT_S = 60.0
"""Of a plain TCP stream's silence."""


@dataclass(frozen=True, slots=True)
class Aim:
    """What moves, over and over: blocks at random places, the first heads of each."""

    direction: Direction
    src_blocks: tuple[int, ...]
    dst_blocks: tuple[int, ...]
    num_heads: int
    seed: int
    """Of the pattern in the source's blocks."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A transfer that ended well, by the clock of the end that started it."""

    prepare_s: float
    """Until the connector could be given it: a plan, with descriptors where it asks for them."""
    post_s: float
    """Of `submit`."""
    transfer_s: float
    """From there to the poll that said that it ended."""
    total_bytes: int
    descriptors: int
    """Runs where the connector asks for them, else boxes: copies of many runs at once."""
