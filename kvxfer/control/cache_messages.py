"""Messages about memory that goes and comes back: between owner and peers, and from a router.

`control.messages` says who sends which; `worker.residency` draws the states between them.
"""

from __future__ import annotations

import msgspec

from kvxfer.transfer.regions import Region


class WireStruct(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Every message: its class's name travels with it, and no field that it does not have."""


class RegionsRevoke(WireStruct, frozen=True):
    """Stop using `regions`, and what a transport keeps of them: learn the agent afresh."""

    epoch: int
    """Counts the revocations of one life of the owner."""
    regions: list[Region]
    descriptions: list[bytes]
    """By rank: the connectors', of the agent and of what stays registered."""


class RegionsRevoked(WireStruct, frozen=True):
    """Nothing of the sender uses regions that were revoked up to `epoch`, or ever will."""

    epoch: int


class Shrink(WireStruct, frozen=True):
    """Give back the memory above `num_blocks` blocks, group by group; wait at most `timeout_s` for
    their users."""

    num_blocks: list[int]
    timeout_s: float


class Sleep(WireStruct, frozen=True):
    """Give all of the cache's memory back; prompts are refused until WakeUp."""

    timeout_s: float


class WakeUp(WireStruct, frozen=True):
    pass


class Defragment(WireStruct, frozen=True):
    """Pack the cache's memory into few large chunks."""

    timeout_s: float


class CacheState(WireStruct, frozen=True):
    """What a Shrink, Sleep, WakeUp or Defragment came to."""

    request: str
    """The name of the message that is answered."""
    problem: str
    """Why it was not done, or not all of it; '' where it was."""
    is_sleeping: bool
    num_blocks: list[int]
    """Blocks of each group that may be used now, the null block among them."""
    committed_bytes: int
    tombstone_bytes: int
    """Addresses without memory that a lost peer may still touch."""
    pinned_bytes: int
    """Memory that was given up but stays mapped, since a lost peer may still touch it."""
