"""A worker as a router knows it.

| worker   | meaning                                 | leaves by                               |
| ---      | ---                                     | ---                                     |
| GREETING | it has not answered yet, or was lost    | Welcome → READY; removed → GONE         |
| READY    | prompts go to it, or are computed there | lost → GREETING; a drain, asked for or  |
|          |                                         | by its own word → DRAINING; removed     |
|          |                                         | → GONE                                  |
| DRAINING | it finishes what it has, and is given   | Goodbye, asked to → DRAINED, else       |
|          | nothing new                             | → GREETING; lost, asked to → GONE       |
| DRAINED  | it has left, and nothing was lost       |                                         |
| GONE     | removed, or lost while it drained       |                                         |

GREETING has no deadline: a worker may be started, or come back, at any time. READY and DRAINING
have that of silence (`peer_timeout_s`). Of DRAINED and GONE the router forgets the worker: one that
is started there again has to be added again.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvxfer.control.facts import WorkerFacts


class BackendState(enum.Enum):
    GREETING = enum.auto()
    READY = enum.auto()
    DRAINING = enum.auto()
    DRAINED = enum.auto()
    GONE = enum.auto()


@dataclass(eq=False)
class Backend:
    """One worker; the router's alone."""

    key: str
    facts: WorkerFacts | None = None
    """None while it is being greeted."""
    last_seen_s: float = field(default_factory=time.monotonic)
    hello_at_s: float = 0.0
    """When to greet it again, if it has not answered by then."""
    hello_pause_s: float = 0.0
    given_up: list[str] = field(default_factory=list)
    """Ids of requests it may still work on, to be cancelled when it is back."""
    role: str = ""
    """As it said last; '' where it never answered and nobody told."""
    state: BackendState = BackendState.GREETING
    is_leaving: bool = False
    """It was asked to drain: whatever ends that, it is forgotten."""
    drain_reason: str = ""
    status: Mapping[str, int | float | str] = field(default_factory=dict)
    """What its newest Status said; empty before there was one of this life of it."""
    status_s: float = 0.0
    """When that came (monotonic)."""
    has_cached: bool = False
    """Whether it ever told of cached blocks: those that prompts use are not among them."""
    num_of_others: int = 0
    """What it then had of other routers: requests where it decodes, tokens where it prefills."""
    num_ours: int = 0
    """The most that it can have had of ours since then, in the same units."""

    @property
    def name(self) -> str:
        return self.facts.worker_id if self.facts else self.address

    @property
    def address(self) -> str:
        return self.key.removeprefix("out:")

    @property
    def takes_new(self) -> bool:
        """Whether something new may be given to it."""
        return self.state is BackendState.READY and not self.status.get("is_sleeping")

    @property
    def is_drained(self) -> bool:
        return self.state is BackendState.DRAINED
