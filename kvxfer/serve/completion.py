"""One prompt on its way through a router, whichever decode workers it takes.

| state    | what happens                                | leaves by                     |
| ---      | ---                                         | ---                           |
| WAITING  | its worker was lost before a token came, or | a decode worker is ready      |
|          | could not be reached                        | → SENT                        |
| SENT     | tokens arrive, and are put in order         | Finished, and all tokens that |
|          |                                             | it counts → ENDED; lost:      |
|          |                                             | without a token → WAITING,    |
|          |                                             | else → ENDED, as an error     |
| ENDED    | `finished` says how                         |                               |

WAITING and SENT have the completion's deadline, ENDED is the terminal state: an error, never an
answer that is cut short and looks whole.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from kvxfer.control.facts import WorkerFacts
from kvxfer.control.router_messages import Finished, Generate, TransferStats

MAX_ATTEMPTS = 3
LATE_TOKENS_S = 1.0
"""How long after Finished a token that it counts may still come."""


@dataclass
class Backend:
    """A worker that the router talks to."""

    key: str
    facts: WorkerFacts | None = None
    """None while it is being greeted."""
    last_seen_s: float = field(default_factory=time.monotonic)
    hello_at_s: float = 0.0
    """When to greet it again, if it has not answered by then."""
    hello_pause_s: float = 0.0
    given_up: list[str] = field(default_factory=list)
    """Ids of requests it may still work on, to be cancelled when it is back."""

    @property
    def name(self) -> str:
        return self.facts.worker_id if self.facts else self.key.removeprefix("out:")


@dataclass
class Completion:
    """Filled in as messages arrive."""

    request_id: str
    tokens: list[int]
    backend: Backend
    sent_s: float
    generate: Generate
    """As it was sent last: each attempt has an id of its own, so that no word of an earlier one is
    taken for its."""
    deadline_s: float
    is_waiting: bool = False
    attempt: int = 1
    output: list[int] = field(default_factory=list)
    given_s: float = 0.0
    """When this attempt was given to a worker; 0 while it was not."""
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
        if self.finished is None:
            count = len(self.output)
            none = TransferStats()
            self.ended_s = time.monotonic()
            self.finished = Finished(self.request_id, "error", error, 0, none, [], count, 0.0)

    def begin_again(self) -> None:
        self.attempt += 1
        self.is_waiting = True
        self.end, self.end_s, self.given_s = None, 0.0, 0.0
        self.early.clear()
        name = f"{self.request_id}.{self.attempt}"
        self.generate = msgspec.structs.replace(self.generate, request_id=name)

    def why_over(self, now_s: float) -> str:
        """Why nothing more is waited for, or ''."""
        if self.end is not None and now_s > self.end_s + LATE_TOKENS_S:
            return f"{len(self.output)} of {self.end.num_tokens} tokens arrived"
        if now_s <= self.deadline_s:
            return ""
        return f"no whole answer within {self.deadline_s - self.sent_s:g} s"
