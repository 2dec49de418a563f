"""What the router counts of requests, under vLLM's names. One thread: the HTTP front's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvxfer.telemetry.families import BETWEEN_TOKENS_S, FIRST_TOKEN_S, REQUEST_S
from kvxfer.telemetry.metrics import Samples, Tally

REASONS = ("stop", "length", "cancelled", "overloaded", "refused", "error")
"""How a request may end; any other reason counts as an error."""


class RequestMetrics:
    """The front calls `observe_…` as things happen, and `gather` when somebody looks."""

    def __init__(self) -> None:
        self._first_token = Tally(FIRST_TOKEN_S)
        self._between_tokens = Tally(BETWEEN_TOKENS_S)
        self._whole = Tally(REQUEST_S)
        self._ended: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._scrape_failures = 0
        self.load: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Requests that workers have, and requests that no worker has yet; set by the owner."""

    def observe_first_token(self, seconds: float) -> None:
        """Since the request's arrival."""
        self._first_token.observe(seconds)

    def observe_inter_token(self, seconds: float) -> None:
        """Since the request's token before."""
        self._between_tokens.observe(seconds)

    def observe_end(
        self, reason: str, seconds: float, prompt_tokens: int, generation_tokens: int
    ) -> None:
        """A request ended, `seconds` after its arrival; once for each."""
        self._ended[reason if reason in REASONS else "error"] += 1
        self._whole.observe(seconds)
        self._prompt_tokens += prompt_tokens
        self._generation_tokens += generation_tokens

    def scrape_failed(self) -> None:
        """A worker did not tell its metrics."""
        self._scrape_failures += 1

    def gather(self) -> Samples:
        found = Samples()
        found.add_tally("kvxfer_time_to_first_token_seconds", self._first_token)
        found.add_tally("kvxfer_inter_token_latency_seconds", self._between_tokens)
        found.add_tally("kvxfer_e2e_request_latency_seconds", self._whole)
        found.add("kvxfer_prompt_tokens_total", self._prompt_tokens)
        found.add("kvxfer_generation_tokens_total", self._generation_tokens)
        for reason, count in self._ended.items():
            found.add("kvxfer_request_success_total", count, finished_reason=reason)
        running, waiting = self.load()
        found.add("kvxfer_num_requests_running", running)
        found.add("kvxfer_num_requests_waiting", waiting)
        found.add("kvxfer_scrape_failures_total", self._scrape_failures)
        return found
