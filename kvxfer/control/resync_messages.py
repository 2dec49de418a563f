"""Messages that ask again for what may have been lost: each may be sent any number of times.

`control.messages` says who sends which.
"""

from __future__ import annotations

from kvxfer.control.cache_messages import WireStruct
from kvxfer.transfer.regions import Region


class HelloWanted(WireStruct, frozen=True):
    """The answer to a heartbeat of somebody unknown: the sender restarted, or lost the other."""


class RegionsAt(WireStruct, frozen=True):
    """Revocations and additions so far: whoever knows of fewer has missed some."""

    epoch: int
    generation: int


class RegionsQuery(WireStruct, frozen=True):
    """An update or a revocation was lost: what is registered now?"""


class RegionsState(WireStruct, frozen=True):
    """All that is registered; what the asker knew besides was revoked."""

    epoch: int
    generation: int
    regions: list[Region]
    descriptions: list[bytes]
    """By rank, as in Hello."""


class GrantQuery(WireStruct, frozen=True):
    """What has become of the grant? `tokens_read`, `layers_read` and `stretch_end` tell, on pull,
    what was offered so far, or is not handed over: all layers of tokens before the first, then some
    of those up to the last."""

    request_id: str
    grant_id: str
    tokens_read: int
    layers_read: list[int]
    """Group by group; empty where none of the next tokens were offered."""
    stretch_end: int


class GrantUnknown(WireStruct, frozen=True):
    """Its PrefillRequest never came: send it again."""

    request_id: str
    grant_id: str
