"""Whether a hand-over that failed is tried with another prefill worker."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from decode.admission import choose_prefill
from decode.schedule import DecodeRequest, RequestState
from kvxfer.control.session import Peer

MAX_ATTEMPTS = 3
"""Of one request, the first among them."""


def untried(request: DecodeRequest, ready: Sequence[Peer]) -> list[Peer]:
    """Prefill workers that no earlier attempt was given to."""
    return [peer for peer in ready if peer.key not in request.tried]


def next_attempt(
    request: DecodeRequest, ready: Sequence[Peer], requests: Iterable[DecodeRequest]
) -> DecodeRequest | None:
    """The request begun anew, to wait for blocks of its own; None where it was tried often enough,
    late, or everywhere. Its deadline, and what its router was told, stay."""
    if request.state is not RequestState.GRANTED or request.is_cancelled:
        return None
    if request.attempt >= MAX_ATTEMPTS or time.monotonic() > request.deadline_s:
        return None
    again = request.again()
    found = choose_prefill(again, untried(again, ready), requests)
    return again if found is not None else None


def why_nowhere(request: DecodeRequest, ready: Sequence[Peer]) -> str:
    """Why a request that was tried before cannot be tried again, or ''."""
    waits = request.state is RequestState.WAITING and request.attempt > 1
    if not waits or untried(request, ready):
        return ""
    return f"prefill failed {request.attempt - 1} times, and no other prefill worker is ready"
