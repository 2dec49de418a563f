"""The prompts that a router got last, and when what happened to each: for whoever looks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvxfer.serve.completion import Completion

MAX_LIVES = 64


@dataclass(frozen=True, slots=True)
class Life:
    """Times are seconds of CLOCK_MONOTONIC; None: not yet, or never."""

    request_id: str
    num_prompt_tokens: int
    decode: str
    """The worker that it was given to last; '' before."""
    attempt: int
    arrived_s: float
    given_s: float | None
    """To a decode worker, of the last attempt."""
    first_token_s: float | None
    num_tokens: int
    ended_s: float | None
    reason: str
    """As in Finished; '' before its end."""


def life_of(one: Completion) -> Life:
    """As it stands now."""
    return Life(
        one.request_id,
        len(one.tokens),
        one.backend.name if one.backend else "",
        one.attempt,
        one.sent_s,
        None if one.is_waiting else one.placed_s or one.sent_s,
        one.first_token_s,
        len(one.output),
        one.ended_s or None,
        one.finished.reason if one.finished else "",
    )


class Lives:
    """Bounded; of those that have ended neither prompts nor answers are kept for it."""

    def __init__(self) -> None:
        self._newest: deque[Completion | Life] = deque(maxlen=MAX_LIVES)

    def add(self, completion: Completion) -> None:
        for index, one in enumerate(self._newest):
            if isinstance(one, Completion) and one.finished is not None:
                self._newest[index] = life_of(one)
        self._newest.append(completion)

    def look(self) -> list[Life]:
        """In order of arrival."""
        return [one if isinstance(one, Life) else life_of(one) for one in self._newest]
