"""What the front sees of completions, turned into the router's metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvxfer.serve.completion import Completion
from kvxfer.telemetry.request_metrics import RequestMetrics
from kvxfer.telemetry.spans import NO_SPAN, Span, Value


@dataclass(slots=True)
class Observed:
    """One completion; `news` is called when tokens came or it ended, `left` when nobody waits for
    it any more. Counts each token and the end once."""

    completion: Completion
    metrics: RequestMetrics
    span: Span = NO_SPAN
    _num_seen: int = 0
    _last_s: float = 0.0
    _is_over: bool = False

    def news(self) -> None:
        completion, now = self.completion, time.monotonic()
        fresh = len(completion.output) - self._num_seen
        if fresh and not self._num_seen:
            self.metrics.observe_first_token(completion.ttft_s)
            self._last_s, fresh = completion.sent_s + completion.ttft_s, fresh - 1
        for _ in range(fresh):  # those that came together share the time since the one before
            self.metrics.observe_inter_token((now - self._last_s) / fresh)
        if len(completion.output) > self._num_seen:
            self._num_seen, self._last_s = len(completion.output), now
        if completion.finished is not None:
            self._end(completion.finished.reason)

    def left(self) -> None:
        self.news()
        self._end("cancelled")

    def _end(self, reason: str) -> None:
        if self._is_over:
            return
        self._is_over = True
        completion = self.completion
        took_s = time.monotonic() - completion.sent_s
        num_prompt, num_output = len(completion.tokens), len(completion.output)
        self.metrics.observe_end(reason, took_s, num_prompt, num_output)
        told: dict[str, Value] = {
            "gen_ai.usage.prompt_tokens": num_prompt,
            "gen_ai.usage.completion_tokens": num_output,
        }
        if completion.first_token_s is not None:
            told["gen_ai.latency.time_to_first_token"] = completion.ttft_s
        error = completion.finished.error if completion.finished is not None else ""
        self.span.end(reason, error, **told)
