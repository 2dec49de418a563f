"""Every metric of kvxfer: its name, what it counts, its labels. README's table is of these.

Names follow Prometheus' conventions (base units, `_total` for what only grows) and vLLM's where a
metric means the same. Labels have few values: no request is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

TRANSFER_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
GROWTH_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


@dataclass(frozen=True, slots=True)
class Family:
    """One metric."""

    name: str
    """As it is asked for: a counter's ends in _total."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's, without the last, which is infinite."""

    @property
    def base(self) -> str:
        """prometheus_client calls a counter so."""
        return self.name.removesuffix("_total") if self.kind == "counter" else self.name


_MOVED = ("connector", "direction")

WORKER = (
    Family("kvxfer_build_info", "gauge", "Always 1: what this worker is.",
           ("version", "wire_version", "layout")),
    Family("kvxfer_transfer_bytes_total", "counter",
           "KV that transfers of this worker moved, which started them; trials of lanes too.",
           _MOVED),
    Family("kvxfer_transfer_seconds", "histogram",
           "From a transfer's start to its visible end.", _MOVED, TRANSFER_S),
    Family("kvxfer_transfer_descriptors_total", "counter",
           "Stretches of bytes that are contiguous on both sides, in transfers that ended well.",
           _MOVED),
    Family("kvxfer_transfer_failures_total", "counter",
           "Transfers that ended in an error: none of their bytes is used.", _MOVED),
    Family("kvxfer_lane_bytes_per_second", "gauge",
           "What the lane to a peer gave when it was tried out and chosen.", ("peer", "lane")),
    Family("kvxfer_cache_reserved_bytes", "gauge", "Addresses reserved for the KV cache."),
    Family("kvxfer_cache_committed_bytes", "gauge", "Of these, with memory behind them."),
    Family("kvxfer_cache_registered_bytes", "gauge", "Of these, registered for transfers."),
    Family("kvxfer_cache_budget_bytes", "gauge", "What the KV cache may grow to, as measured."),
    Family("kvxfer_cache_tombstone_bytes", "gauge",
           "Addresses without memory that a lost peer may still touch."),
    Family("kvxfer_cache_pinned_bytes", "gauge",
           "Memory given up that stays mapped, since a lost peer may still touch it."),
    Family("kvxfer_growth_seconds", "histogram",
           "From the wish for more memory until peers and allocator have it.", (), GROWTH_S),
    Family("kvxfer_growth_failures_total", "counter", "Growths that left the cache as it was."),
    Family("kvxfer_blocks", "gauge", "Blocks of the cache by state.", ("state",)),
    Family("kvxfer_prefix_cache_queries_total", "counter",
           "Tokens of prompts that were looked up in the prefix cache."),
    Family("kvxfer_prefix_cache_hits_total", "counter", "Of these, tokens that were found."),
    Family("kvxfer_requests_total", "counter", "Requests that ended at this worker, by why.",
           ("reason",)),
    Family("kvxfer_num_preemptions_total", "counter",
           "Times that decode took a sequence's blocks for an older one."),
    Family("kvxfer_num_requests_running", "gauge", "Requests that are being worked on."),
    Family("kvxfer_num_requests_waiting", "gauge", "Requests that wait for their turn."),
    Family("kvxfer_peers", "gauge", "Workers that KV may flow to or from."),
    Family("kvxfer_malformed_messages_total", "counter", "Dropped: no message of ours."),
    Family("kvxfer_misplaced_messages_total", "counter", "Dropped: not for a worker like this."),
    Family("kvxfer_wrong_messages_total", "counter",
           "Messages that made no sense; each cost its sender the session."),
    Family("kvxfer_revoked_messages_total", "counter", "Dropped: their sender's key was revoked."),
    Family("kvxfer_refused_connections_total", "counter", "Connections without an allowed key."),
)  # fmt: skip

ROUTER = (
    Family("kvxfer_time_to_first_token_seconds", "histogram",
           "From a request's arrival to its first token.", (), FIRST_TOKEN_S),
    Family("kvxfer_inter_token_latency_seconds", "histogram",
           "Between two tokens of a request.", (), BETWEEN_TOKENS_S),
    Family("kvxfer_e2e_request_latency_seconds", "histogram",
           "From a request's arrival to its end.", (), REQUEST_S),
    Family("kvxfer_prompt_tokens_total", "counter", "Tokens of prompts."),
    Family("kvxfer_generation_tokens_total", "counter", "Tokens generated."),
    Family("kvxfer_request_success_total", "counter", "Requests that ended, by how.",
           ("finished_reason",)),
    Family("kvxfer_num_requests_running", "gauge", "Requests that workers have."),
    Family("kvxfer_num_requests_waiting", "gauge", "Requests that no worker has yet."),
    Family("kvxfer_scrape_failures_total", "counter",
           "Workers that did not tell their metrics in time, or not so that they can be read."),
)  # fmt: skip

FAMILIES = {family.name: family for family in (*ROUTER, *WORKER)}
"""By name. Where router and worker have one in common, the worker's samples say which worker."""
