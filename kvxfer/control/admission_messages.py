"""Messages about who may start when: between a decode worker and a prefill worker's queue.

A prompt that is asked for without blocks waits at prefill and costs decode nothing. `Starting`
says that its turn is near, `Granted` names the blocks, and only then can it start.
"""

from __future__ import annotations

from kvxfer.control.cache_messages import WireStruct


class Starting(WireStruct, frozen=True):
    """Prefill is about to start: into which blocks? Of a grant without blocks; again to who asks
    about it (`GrantQuery`)."""

    request_id: str
    grant_id: str


class Granted(WireStruct, frozen=True):
    """The answer, to each call: the grant is of these blocks, as in `Grant`."""

    request_id: str
    grant_id: str
    blocks: list[list[int]]
    num_cached_tokens: int


class Busy(WireStruct, frozen=True):
    """Prefill's queue is full: it did not take the request, and will write nothing for it."""

    request_id: str
    grant_id: str
    retry_after_s: float
    """When what waits now may have been served."""
