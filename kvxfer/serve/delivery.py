"""Prompts on their way to workers, and what comes back of them.

States: see `kvxfer.serve.completion`.
"""

from __future__ import annotations

import logging

import msgspec

from kvxfer.control.router_messages import Cancel, Finished, Token
from kvxfer.serve.backend import Backend
from kvxfer.serve.completion import MAX_ATTEMPTS, Completion
from kvxfer.serve.estimates import Estimates
from kvxfer.serve.fleet import Fleet

logger = logging.getLogger(__name__)

SETTLE_S = 0.02
"""Between two looks at all deadlines, and at prompts that wait."""
RETRY_S = 1.0
"""After which to come back where too many wait for a worker."""


class Delivery:
    """One thread. `completions`: those that have not ended, by the id they were sent under."""

    def __init__(self, fleet: Fleet, max_num_waiting: int) -> None:
        self._fleet = fleet
        self._max_num_waiting = max_num_waiting
        self.completions: dict[str, Completion] = {}
        self.estimates = Estimates(self.completions)
        self._settle_at_s = 0.0

    @property
    def num_waiting(self) -> int:
        """Prompts that no worker has."""
        return sum(one.is_waiting for one in self.completions.values())

    def add(self, completion: Completion) -> None:
        """Send it, or have it wait; one too many has ended when this returns."""
        completion.is_waiting = True
        if not self._send(completion) and self.num_waiting >= self._max_num_waiting:
            completion.overload(f"{self.num_waiting} prompts wait for a worker", RETRY_S)
        else:
            self.completions[completion.generate.request_id] = completion

    def drop(self, completion: Completion, error: str) -> None:
        del self.completions[completion.generate.request_id]
        completion.fail(error)

    def settle_soon(self) -> None:
        """A worker came or went."""
        self._settle_at_s = 0.0

    def tick(self, now: float) -> None:
        if now < self._settle_at_s:
            return
        self._settle_at_s = now + SETTLE_S
        for completion in list(self.completions.values()):
            self._settle(completion, now)

    def _settle(self, completion: Completion, now: float) -> None:
        """Whatever is due for a prompt."""
        over = completion.why_over(now)
        if over:
            if not completion.is_waiting and completion.backend is not None:
                self._fleet.send(completion.backend, Cancel(completion.generate.request_id))
            self.drop(completion, over)
        elif completion.is_waiting:
            self._send(completion)

    # --- to a worker --------------------------------------------------------------------------

    def _send(self, completion: Completion) -> bool:
        """Whether it left: to the pair that suits it best, or, where it was meant for one worker,
        to that or to another that decodes. Else perhaps later."""
        if completion.is_free:
            return self._place(completion)
        meant = completion.backend
        load = [id(other.backend) for other in self.completions.values() if not other.is_waiting]
        up = [one for one in self._fleet.backends.values() if one.facts is not None]
        fitting = [one for one in up if one is meant or (one.takes_new and one.role == "decode")]
        fitting.sort(key=lambda one: (one is not meant, load.count(id(one))))
        for backend in fitting:
            if self._fleet.send(backend, completion.generate):
                completion.backend, completion.is_waiting = backend, False
                return True
        return False

    def _place(self, completion: Completion) -> bool:
        decodes = self._untried(completion)
        while decodes:
            decode = self.estimates.place(completion, self._fleet.taking("prefill"), decodes)
            if self._fleet.send(decode, completion.generate):
                completion.is_waiting = False
                return True
            decodes.remove(decode)
        return False

    def _untried(self, completion: Completion) -> list[Backend]:
        """Decode workers that may take it: those that are not overloaded."""
        decodes = self._fleet.taking("decode")
        return [one for one in decodes if one.key not in completion.refusals]

    def _again(self, completion: Completion) -> None:
        """Under another id, when there is a worker for it."""
        del self.completions[completion.generate.request_id]
        completion.begin_again()
        self.completions[completion.generate.request_id] = completion

    # --- back from it -------------------------------------------------------------------------

    def lost(self, backend: Backend, reason: str) -> None:
        """Its prompts begin again elsewhere if nobody was told a token of them, else they end."""
        for completion in list(self.completions.values()):
            if completion.backend is not backend or completion.is_waiting:
                continue
            backend.given_up.append(completion.generate.request_id)
            completion.num_lost += 1
            completion.loss = f"worker {backend.name}: {reason}"
            if completion.output or completion.num_lost >= MAX_ATTEMPTS:
                told = f"after {len(completion.output)} tokens" if completion.output else "again"
                self.drop(completion, f"worker {backend.name}: {reason}, {told}")
            else:
                self._again(completion)
        self.settle_soon()

    def progress(self, backend: Backend, message: Token | Finished) -> None:
        """Of a prompt that this worker has; what was given up or taken elsewhere is nobody's."""
        completion = self.completions.get(message.request_id)
        if completion is None or completion.backend is not backend or completion.is_waiting:
            return
        if isinstance(message, Token):
            completion.take(message.index, message.token)
        elif message.reason == "overloaded" and completion.is_free and not completion.output:
            self._refused(completion, backend, message)
        else:
            completion.close(message)
        if completion.finished is not None:
            del self.completions[completion.generate.request_id]

    def _refused(self, completion: Completion, backend: Backend, end: Finished) -> None:
        """Another worker is tried while there is one; one that drains said nothing of its load."""
        if backend.takes_new:
            completion.refusals[backend.key] = end.retry_after_s
        if backend.takes_new and not self._untried(completion):
            soonest_s = min(completion.refusals.values())
            completion.close(msgspec.structs.replace(end, retry_after_s=soonest_s))
            return
        self._again(completion)
        self._send(completion)
