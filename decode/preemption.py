"""A sequence that lost its blocks to an older one, and how it comes back without a loss.

Its blocks go, what it said stays: prefill computes prompt and output once more, as one prompt, and
what follows is the next token, at the same position, so with the same noise (`model.sampling`). The
router sees a pause: no token is told twice, and none changes. Bits of KV may differ where a token
was decoded first and is prefilled now, as attention works in tiles: what follows may be another
token where two logits are as good as equal, as with a cached prefix. Measured with the bundled
model in float32 on the CPU, one thread, greedy: of 20 prompts of up to 300 tokens, each resumed at
5 places of its 80 tokens, KV differs by 3e-5 at most, and no token does.

Nothing waits for ever. Who came last is preempted first, so the oldest that runs never is: alone it
fits, or it would have been refused (`Engine.why_too_long`), so it comes to its end. A preempted one
keeps its place by arrival, and no other gets blocks before it does. All that hold blocks end, since
the oldest of them does: then there are enough. Its deadline begins once nobody runs in front of it
any more, `request_timeout_s` from then to the end of its hand-over; after it, or where each prefill
worker failed, it ends in an error, never as if it was whole.
"""

from __future__ import annotations

import logging
import time

from decode.admission import LONGEST_RETRY_S, Admission, Requests
from decode.schedule import DecodeRequest, RequestState
from kvxfer.worker.assembly import WorkerParts

logger = logging.getLogger(__name__)

SHORTEST_RETRY_S = 0.05


class Preemption:
    """Of a worker's `requests`. Control thread only."""

    def __init__(self, parts: WorkerParts, requests: Requests, admission: Admission) -> None:
        self._parts = parts
        self._requests = requests
        self._admission = admission
        self.count = 0

    def preempt(self, request: DecodeRequest) -> None:
        """It has left the batch: its blocks are free, for whoever asks next."""
        self.count += 1
        num_blocks, num_tokens = sum(map(len, request.blocks)), len(request.output)
        logger.info(
            "request %s: preempted after %d tokens, %d blocks go to those who came before it",
            request.request_id,
            num_tokens,
            num_blocks,
        )
        self._parts.trace.event(
            "preempted", request=request.request_id, tokens=num_tokens, blocks=num_blocks
        )
        self._admission.forget(request)
        self._parts.engine.pools.free(request.blocks)
        request.blocks, request.state = [], RequestState.ENDED
        again = request.preempted(self._new_deadline_s())
        self._requests[again.request_id] = again
        self._admission.put(again)

    def look(self, is_any_running: bool) -> None:
        """Let those in who can be; who has others in front of it has time."""
        waiting = list(self._admission.preempted)
        for request in waiting if is_any_running else ():
            request.deadline_s = self._new_deadline_s()
        if waiting:
            self._admission.admit()

    def _new_deadline_s(self) -> float:
        return time.monotonic() + self._parts.options.request_timeout_s


def later(request: DecodeRequest, retry_after_s: float) -> DecodeRequest:
    """One that was preempted before, where all prefill workers are busy: once more, in a while."""
    again = request.preempted(request.deadline_s)
    pause_s = min(max(0.0, retry_after_s), LONGEST_RETRY_S)
    again.not_before_s = time.monotonic() + max(SHORTEST_RETRY_S, pause_s)
    return again
