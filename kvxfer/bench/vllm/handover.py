"""One request through two engines, and what the consumer's connector says of its transfer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.bench.vllm.client import TIMEOUT_S, Answer, EngineClient

TOLD_TIMEOUT_S = 5.0
"""For what was moved to be in the metrics: they come with the engine's steps."""
IDLE_TIMEOUT_S = 60.0
USAGE = "vllm:kv_cache_usage_perc"
REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")


@dataclass(frozen=True, slots=True)
class Moved:
    """By transfers of a connector: differences of its metrics."""

    transfers: int
    move_s: float
    size_bytes: int
    descriptors: int
    failed: int


def hand_over(
    producer: EngineClient,
    consumer: EngineClient,
    prompt: Sequence[int],
    max_tokens: int,
    timeout_s: float = TIMEOUT_S,
) -> tuple[Answer, float]:
    """As vLLM's proxies for NixlConnector do it: what the producer's answer says goes to the
    consumer as it is. The answer, and the seconds of the first step. Raises EngineError."""
    request_id = uuid.uuid4().hex
    params, prefill_s = producer.prefill(prompt, request_id, timeout_s)
    return consumer.complete(prompt, max_tokens, params, request_id, timeout_s), prefill_s


def read_moved(consumer: EngineClient, metrics: str) -> Moved:
    """Since it started; `metrics` is what its connector's names begin with."""
    found = consumer.metrics()

    def total(name: str) -> float:
        return found.get(metrics + name, 0.0)

    return Moved(
        int(total("bytes_transferred_count")),
        total("xfer_time_seconds_sum"),
        int(total("bytes_transferred_sum")),
        int(total("num_descriptors_sum")),
        int(total("num_failed_transfers_total")),
    )


def moved_since(consumer: EngineClient, metrics: str, before: Moved) -> Moved:
    """Waits until there is some, or TOLD_TIMEOUT_S."""
    deadline_s = time.monotonic() + TOLD_TIMEOUT_S
    while True:
        now = read_moved(consumer, metrics)
        if now.transfers > before.transfers or time.monotonic() > deadline_s:
            return Moved(
                now.transfers - before.transfers,
                now.move_s - before.move_s,
                now.size_bytes - before.size_bytes,
                now.descriptors - before.descriptors,
                now.failed - before.failed,
            )
        time.sleep(0.05)


def blocks_held(client: EngineClient, num_blocks: int, timeout_s: float = IDLE_TIMEOUT_S) -> int:
    """What is still held of its cache's `num_blocks` when no request is left, or after
    `timeout_s`. Blocks that only the prefix cache keeps are not held."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        found = client.metrics()
        held = round(found[USAGE] * (num_blocks - 1))  # the null block does not count
        idle = not held and not any(found[name] for name in REQUESTS)
        if idle or time.monotonic() > deadline_s:
            return held
        time.sleep(0.2)
