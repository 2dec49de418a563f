"""What a picture of one worker needs: its cache, its transfers, its requests. Bounded, whatever the
worker holds; made only when a router asks, for people who look at it.

Times are nanoseconds of the worker's CLOCK_MONOTONIC; a router places them by when it asked and was
answered.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvxfer.control.cache_messages import WireStruct

MAX_RUNS = 2048
"""Of one group; above that a cell stands for several blocks."""
MAX_RANGES = 512
"""Above that the narrowest gaps between them are told as if they were none."""
MAX_TRANSFERS = 64
MAX_UNDER_WAY = 16
MAX_REQUESTS = 64
MAX_STATES = 16
MAX_LANES = 64

Ranges = Annotated[list[tuple[int, int]], msgspec.Meta(max_length=MAX_RANGES)]
"""(offset, size) in bytes from the cache's base, sorted and disjoint."""


class GroupView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The blocks of one group."""

    kind: str
    layout: str
    block_size: int
    """Tokens."""
    block_bytes: int
    offset: int
    """Bytes, of its first segment."""
    num_segments: int
    segment_bytes: int
    """From one segment to the next."""
    segment_block_bytes: int
    """What one block has in each segment."""
    capacity: int
    """Blocks whose addresses are reserved."""
    committed: int
    usable: int
    """The bound: those that may be granted, all of which are committed."""
    counts: Annotated[list[int], msgspec.Meta(max_length=16)]
    """Of the usable blocks so many in each `kvxfer.cache.block_states.BlockState`, in its order."""
    blocks_per_cell: int
    cells: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=MAX_RUNS)]
    """(state, number of cells) from block 0 up to `usable`; a cell has the state of the block in it
    whose state is the highest."""


class LaneView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    peer: str
    lane: str
    gbps: float
    """GB/s as measured when it was chosen; 0 where it was not."""


class TransferView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One transfer that this worker started."""

    number: int
    """Counts this worker's transfers."""
    peer: str
    lane: str
    start_ns: int
    end_ns: int
    """0: it is under way."""
    num_bytes: int
    """0 while it is under way."""
    error: str


class RequestView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One attempt of one request."""

    request_id: str
    peer: str
    """The worker at its other end, '' before there is one."""
    states: Annotated[list[tuple[str, int]], msgspec.Meta(max_length=MAX_STATES)]
    """(name, since when), in order; the last one stands."""


class ViewQuery(WireStruct, frozen=True):
    asked_ns: int
    """The asker's clock: comes back as it is."""


class View(WireStruct, frozen=True):
    worker_id: str
    role: str
    asked_ns: int
    now_ns: int
    num_ranks: int
    """Bytes and ranges are rank 0's, blocks the same in all."""
    device: str
    base_address: int
    reserved_bytes: int
    committed_bytes: int
    registered_bytes: int
    budget_bytes: int
    tombstone_bytes: int
    pinned_bytes: int
    is_sleeping: bool
    generation: int
    epoch: int
    committed: Ranges
    registered: Ranges
    groups: Annotated[list[GroupView], msgspec.Meta(max_length=64)]
    lanes: Annotated[list[LaneView], msgspec.Meta(max_length=MAX_LANES)]
    num_transfers: int
    """Of all that ended; `transfers` has the newest."""
    transferred_bytes: int
    transfers: Annotated[list[TransferView], msgspec.Meta(max_length=MAX_TRANSFERS + MAX_UNDER_WAY)]
    num_requests: int
    """Here now, queued ones and quarantined ones among them."""
    requests: Annotated[list[RequestView], msgspec.Meta(max_length=MAX_REQUESTS)]
    """Those that came last, whether they are here still or not."""
