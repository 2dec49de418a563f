"""Messages between routers and workers; `control.messages` says who sends which."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvxfer.control.cache_messages import WireStruct
from kvxfer.telemetry.spans import MAX_TRACEPARENT_CHARS

Traceparent = Annotated[str, msgspec.Meta(max_length=MAX_TRACEPARENT_CHARS)]
"""Of the span that a request's next ones are below, '' where there is none; another text is none,
too (`kvxfer.telemetry.spans`)."""


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's names; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class TransferStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One hand-over, as the side that moved the bytes saw it."""

    num_bytes: int = 0
    num_runs: int = 0
    num_tickets: int = 0
    busy_ns: int = 0
    """Sum over tickets of submitted → complete."""
    start_ns: int = 0
    end_ns: int = 0


class Generate(WireStruct, frozen=True):
    request_id: str
    tokens: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop_token_ids: list[int]
    prefill: str
    """worker_id of the prefill worker of the pair: the first to be asked, if it is there; others
    after a failure. '' lets the decode worker choose."""
    verify: bool
    """Send the digest of each prompt block with Finished; a worker of several ranks has none."""
    traceparent: Traceparent = ""


class Cancel(WireStruct, frozen=True):
    request_id: str


class Token(WireStruct, frozen=True):
    request_id: str
    index: int
    """0 for the first generated token."""
    token: int


class Finished(WireStruct, frozen=True):
    request_id: str
    reason: str
    """stop, length, cancelled, error, overloaded: nothing was done, and may be asked again, or
    refused: nothing was done, and this worker can never do it."""
    error: str
    num_blocks: int
    transfer: TransferStats
    kv_digests: list[str]
    num_tokens: int
    """Told of it: fewer that arrived are an answer cut short."""
    retry_after_s: float
    """Overloaded: when those who wait now may have been served, as measured."""
    prefill: str = ""
    """worker_id of the prefill worker that got the grant last, '' where none did."""


class StatusQuery(WireStruct, frozen=True):
    pass


class Status(WireStruct, frozen=True):
    worker_id: str
    values: dict[str, int | float | str]


class Drain(WireStruct, frozen=True):
    """From a router: take no new request, finish those that are here, then say Goodbye and end.
    From a worker: that is what it does now, whoever told it to."""

    reason: str


class Prefills(WireStruct, frozen=True):
    """The prefill workers to work with from now on, all of them: greet those that are new, and
    leave those that are named no longer, once nothing of theirs is under way."""

    addresses: list[str]
    """As they are dialled: with keys ADDRESS#NAME."""
