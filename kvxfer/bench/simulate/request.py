"""A request on its way through the model.

| state    | what happens                                         | leaves by                   |
| ---      | ---                                                  | ---                         |
| COMING   | at the client, then at the router, then at decode    | placed → QUEUED; can never  |
|          |                                                      | be, or queue full → REFUSED |
| QUEUED   | at prefill, without blocks at either end             | blocks at both → COMPUTING  |
| COMPUTING| its prompt's chunks; each leaves when it is computed | the last → MOVING           |
| MOVING   | the rest of its KV is under way                      | proved → RUNNING, or ENDED  |
|          |                                                      | if it wants no more tokens  |
| RUNNING  | decodes, or waits for room in the batch or a block   | length → ENDED; its blocks  |
|          |                                                      | go to an older one → QUEUED |
| ENDED    | its last token is at the client                      |                             |
| REFUSED  | as 'overloaded', or as too long                      |                             |
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class State(enum.Enum):
    COMING = enum.auto()
    QUEUED = enum.auto()
    COMPUTING = enum.auto()
    MOVING = enum.auto()
    RUNNING = enum.auto()
    ENDED = enum.auto()
    REFUSED = enum.auto()


@dataclass(eq=False, slots=True)
class Request:
    """Times are seconds of the model; NaN where it has not come to that."""

    arrival: int
    num_input: int
    num_output: int
    due_s: float
    state: State = State.COMING
    sent_s: float = float("nan")
    first_s: float = float("nan")
    """When its first token was at the client, and when its last one was."""
    last_s: float = float("nan")
    prefill: int = -1
    decode: int = -1
    """Its workers, by place."""
    told: int = 0
    """Tokens of its answer that are known."""
    moved_s: float = 0.0
    """When the pieces of its KV that are under way will be at decode."""
    prefill_blocks: int = 0
    decode_blocks: int = 0
    joined: int = 0
    """Running: the step before its first one, ..."""
    told_before: int = 0
    """... and what it had said by then."""
    life: int = 0
    """Counts its turns in the batch: what was planned for an earlier one is void."""
    num_preempted: int = 0
    why: str = ""
    """Of one that was refused."""

    @property
    def kv_tokens(self) -> int:
        """That are computed: of the newest token none are."""
        return self.num_input + max(0, self.told - 1)

    @property
    def to_compute(self) -> int:
        """Tokens of what prefill is asked for: the prompt, and what was said before."""
        return self.num_input + self.told

    @property
    def most_tokens(self) -> int:
        """That there will ever be KV of."""
        return self.num_input + self.num_output - 1

    @property
    def has_all(self) -> bool:
        """Whether both times are known."""
        return not (math.isnan(self.first_s) or math.isnan(self.last_s))

    @property
    def is_over(self) -> bool:
        return self.state in (State.ENDED, State.REFUSED)
