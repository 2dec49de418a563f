"""Whether a hand-over that failed is tried with another prefill worker."""

from __future__ import annotations

import time
from collections.abc import Sequence

from decode.admission import choose_prefill, untried
from decode.schedule import AT_PREFILL, DecodeRequest, RequestState
from kvxfer.control.session import Peer

MAX_ATTEMPTS = 3
"""Of one request, the first among them."""


def next_attempt(request: DecodeRequest, ready: Sequence[Peer]) -> DecodeRequest | None:
    """The request begun anew, to wait for a grant of its own; None where it was tried often enough,
    late, or everywhere. Its deadline, and what its router was told, stay. One that a worker gives
    back because it drains was not tried there: it waits for another one, should there be none."""
    if request.state not in AT_PREFILL or request.is_cancelled:
        return None
    if request.attempt >= MAX_ATTEMPTS or time.monotonic() > request.deadline_s:
        return None
    again = request.again()
    if request.prefill is not None and request.prefill.is_draining:
        again.attempt, again.tried = request.attempt, request.tried
        return again
    return again if choose_prefill(again, ready, {}) is not None else None


def why_nowhere(request: DecodeRequest, ready: Sequence[Peer]) -> str:
    """Why a request that was tried before cannot be tried again, or ''."""
    has_no_prefill = request.state in (RequestState.WAITING, RequestState.PREEMPTED)
    waits = has_no_prefill and request.attempt > 1
    if not waits or untried(request, ready):
        return ""
    return f"prefill failed {request.attempt - 1} times, and no other prefill worker is ready"
