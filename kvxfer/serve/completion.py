"""One prompt on its way through a router, whichever decode workers it takes.

| state    | what happens                                | leaves by                     |
| ---      | ---                                         | ---                           |
| WAITING  | no worker that takes something new is       | a decode worker is ready      |
|          | ready, or could be reached                  | → SENT                        |
| SENT     | tokens arrive, and are put in order         | Finished, and all tokens that |
|          |                                             | it counts → ENDED; lost:      |
|          |                                             | without a token → WAITING,    |
|          |                                             | else → ENDED, as an error;    |
|          |                                             | overloaded: another one takes |
|          |                                             | new ones → WAITING, else      |
|          |                                             | → ENDED                       |
| ENDED    | `finished` says how                         |                               |

WAITING and SENT have the completion's deadline, ENDED is the terminal state: an error, never an
answer that is cut short and looks whole. So many may wait and no more: one that comes then has
ENDED at once, as 'overloaded'. Each decode worker that is overloaded is asked once; one that drains
said nothing of its load, and is passed over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from kvxfer.control.router_messages import Finished, Generate, TransferStats
from kvxfer.serve.backend import Backend as Backend

MAX_ATTEMPTS = 3
"""Of one prompt, whose workers are lost."""
LATE_TOKENS_S = 1.0
"""How long after Finished a token that it counts may still come."""
LONGEST_RETRY_S = 3600.0
"""A worker's estimate is a hint, not to be believed without bound."""


@dataclass
class Completion:
    """Filled in as messages arrive."""

    request_id: str
    tokens: list[int]
    backend: Backend | None
    """The decode worker that has it, had it last, or is meant to get it; None before one is chosen.
    """
    sent_s: float
    generate: Generate
    """As it was sent last: each attempt has an id of its own, so that no word of an earlier one is
    taken for its."""
    deadline_s: float
    is_waiting: bool = False
    is_free: bool = False
    """The router chooses the pair."""
    prefill: Backend | None = None
    """Named to the decode worker, which may have had to take another one."""
    placed_s: float = 0.0
    """When it was last given to a pair."""
    num_uncached: int = 0
    """Tokens that were then to be computed, as estimated."""
    num_lost: int = 0
    """Workers that it lost."""
    loss: str = ""
    """The last one of them, and why."""
    refusals: dict[str, float] = field(default_factory=dict)
    """Decode workers, by key, that were overloaded, and when they said to try again."""
    attempt: int = 1
    """Counts the ids under which it was sent."""
    output: list[int] = field(default_factory=list)
    first_token_s: float | None = None
    ended_s: float = 0.0
    """When `finished` was set; 0 before."""
    finished: Finished | None = None
    early: dict[int, int] = field(default_factory=dict)
    """Tokens that came before those in front of them."""
    end: Finished | None = None
    """It came before some token did."""
    end_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Time to first token in seconds; NaN before there is one."""
        return float("nan") if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def transfer(self) -> TransferStats:
        return self.finished.transfer if self.finished else TransferStats()

    def take(self, index: int, token: int) -> None:
        """A token, once: whatever comes again, or is beyond what was asked for, changes nothing."""
        if len(self.output) <= index < self.generate.max_new_tokens:
            self.early.setdefault(index, token)
        while (at := len(self.output)) in self.early:
            self.output.append(self.early.pop(at))
            self.first_token_s = self.first_token_s or time.monotonic()
        if self.end is not None:
            self.close(self.end)

    def close(self, end: Finished) -> None:
        """The worker's end of it; stands once all tokens are here that it counts."""
        self.end, self.end_s = end, self.end_s or time.monotonic()
        if end.num_tokens <= len(self.output):
            self.finished, self.ended_s = end, time.monotonic()

    def fail(self, error: str) -> None:
        """Idempotent; what has ended stays as it is."""
        self._end("error", error, 0.0)

    def overload(self, error: str, retry_after_s: float) -> None:
        """As `fail`: nothing was done, and may be asked again after so long."""
        self._end("overloaded", error, max(0.0, min(retry_after_s, LONGEST_RETRY_S)))

    def _end(self, reason: str, error: str, retry_after_s: float) -> None:
        if self.finished is None:
            count, none = len(self.output), TransferStats()
            ended = Finished(self.request_id, reason, error, 0, none, [], count, retry_after_s)
            self.finished, self.ended_s = ended, time.monotonic()

    def begin_again(self) -> None:
        self.attempt += 1
        self.is_waiting = True
        self.prefill = None
        self.end, self.end_s = None, 0.0
        self.early.clear()
        name = f"{self.request_id}.{self.attempt}"
        self.generate = msgspec.structs.replace(self.generate, request_id=name)

    def why_over(self, now_s: float) -> str:
        """Why nothing more is waited for, or ''."""
        if self.end is not None and now_s > self.end_s + LATE_TOKENS_S:
            return f"{len(self.output)} of {self.end.num_tokens} tokens arrived"
        if now_s <= self.deadline_s:
            return ""
        lost = f"; {self.loss}" if self.loss else ""
        return f"no whole answer within {self.deadline_s - self.sent_s:g} s{lost}"
