"""How many answers may be on their way at once."""

from __future__ import annotations

import math

from kvxfer.serve.openai.errors import ApiError
from kvxfer.worker.service_times import ServiceTimes


class Admission:
    """Counts answers from their request to their end. One thread."""

    def __init__(self, max_concurrent_requests: int) -> None:
        self._max = max_concurrent_requests
        self._times = ServiceTimes()
        self.num_in_flight = 0
        self.num_refused = 0

    def enter(self, num_answers: int) -> None:
        """Raises ApiError 429 where that many more are too many; then nothing is counted."""
        excess = self.num_in_flight + num_answers - self._max
        if excess > 0:
            self.num_refused += 1
            raise try_later(
                f"{self.num_in_flight} of at most {self._max} answers are on their way",
                self._times.wait_s(excess),
            )
        self.num_in_flight += num_answers

    def leave(self) -> None:
        """One answer ended."""
        self.num_in_flight -= 1
        self._times.left(self.num_in_flight)


def try_later(reason: str, wait_s: float) -> ApiError:
    """429, with the whole seconds after which to ask again."""
    seconds = max(1, math.ceil(wait_s))
    return ApiError(
        429,
        f"{reason}: try again in {seconds} s",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(seconds)},
    )
