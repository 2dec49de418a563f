"""Requests of a consumer whose KV is elsewhere, and the part of it that each producer's rank has.

| part     | of a request's KV: what one of the producer's ranks has | leaves by |
| ---      | ---                                     | ---                                      |
| NEW      | the link is not READY                   | it is: Claim is sent → CLAIMED           |
| CLAIMED  | Claim is out                            | Ready → HELD                             |
| HELD     | it may be read, and waits for blocks    | load → READING, or TAKEN: nothing to read |
| READING  | tickets of ours are under way           | all done: Taken is sent → TAKEN          |
| TAKEN    | all is read, but not known to be valid  | Confirmed → DONE                         |
| DONE     | what was read is valid                  | |
| FAILED   | it must not be used                     | |

From each but READING any failure leads to FAILED at once; from READING when the last ticket is
done, since until then somebody writes. NEW, CLAIMED and TAKEN have `claim_timeout_s`, HELD and
READING none: vLLM's queue, and a transfer, may take their time while the producer lives.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from connectors.vllm.handover import Claim, Load
from connectors.vllm.links import Link
from connectors.vllm.messages import Ready
from connectors.vllm.ranks import Share
from kvxfer.transfer.endpoint import Ticket


class PartState(enum.Enum):
    NEW = enum.auto()
    CLAIMED = enum.auto()
    HELD = enum.auto()
    READING = enum.auto()
    TAKEN = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


ENDED = (PartState.DONE, PartState.FAILED)
TIMED = (PartState.NEW, PartState.CLAIMED, PartState.TAKEN)


@dataclass(slots=True)
class Part:
    share: Share
    incarnation: str
    link: Link | None = None
    state: PartState = PartState.NEW
    since_s: float = field(default_factory=time.monotonic)
    ready: Ready | None = None
    tickets: list[Ticket] = field(default_factory=list)
    started_s: float = 0.0

    def become(self, state: PartState) -> None:
        self.state, self.since_s = state, time.monotonic()


@dataclass(slots=True)
class Request:
    """One of ours whose KV is elsewhere."""

    claim: Claim
    parts: list[Part]
    load: Load | None = None
    """Once vLLM waits for it."""
    error: str = ""
    """Why its KV must not be used."""
    is_dropped: bool = False
    """vLLM will not ask for a load."""

    @property
    def has_ended(self) -> bool:
        return all(part.state in ENDED for part in self.parts)
