"""A worker's metrics: gathered from its own counts when somebody asks, in the control thread, whose
state they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from kvxfer.control.messages import WIRE_VERSION
from kvxfer.control.telemetry_messages import Metrics, MetricsQuery
from kvxfer.telemetry.metrics import Samples
from kvxfer.worker.residency import ResidencyState

if TYPE_CHECKING:
    from kvxfer.worker.assembly import WorkerParts
    from kvxfer.worker.loop import ControlLoop
    from kvxfer.worker.mailbox import Mailbox
    from kvxfer.worker.metrics_server import MetricsServer
    from kvxfer.worker.work_thread import Report

MAX_PEERS_TOLD = 256
"""Peers whose lanes are told, whoever comes: all is far less than `MAX_METRICS_CHARS`."""
REASONS = ("done", "stop", "length", "cancelled", "overloaded", "refused", "error")
"""Why a request may end at a worker. done: prefill's, handed over."""


class WorkerMetrics:
    """Counts as the roles call `ended`; the rest is read where it is. Control thread only."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.load: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Requests that are worked on, and that wait; set by the role."""
        self.prefix_tokens: Callable[[], tuple[int, int]] | None = None
        """Tokens that were looked up in the role's prefix cache, and that were found."""
        self.num_preemptions: Callable[[], int] | None = None
        """Of a role that may take blocks from sequences."""
        self.turned_away: Callable[[], Mapping[str, int]] = dict
        """Messages and connections, by name."""

    def ended(self, reason: str) -> None:
        """A request ended, by one of REASONS."""
        self._ended[reason if reason in REASONS else "error"] += 1

    def listen(self, parts: WorkerParts, loop: ControlLoop) -> None:
        """Have `loop` answer those who ask for metrics; once."""

        def on_query(key: str, query: MetricsQuery) -> None:
            parts.peers.answer_stranger(key, Metrics(self.gather(parts).text()))

        self.turned_away = loop.turned_away
        loop.also({MetricsQuery: on_query})

    def serve(self, parts: WorkerParts, server: MetricsServer, reports: Mailbox[Report]) -> None:
        """Have `server` answer; who drains `reports` is the control thread. Once."""
        server.start(reports, lambda: self.gather(parts).text(), lambda: unready(parts))

    def gather(self, parts: WorkerParts) -> Samples:
        found = Samples()
        cache = parts.engine.cache
        layout = ",".join(group.layout for group in cache.geometry.groups)
        told = {"version": _version(), "wire_version": str(WIRE_VERSION), "layout": layout}
        found.add("kvxfer_build_info", 1, **told)
        parts.transfer.counts.gather(found)
        self._gather_cache(parts, found)
        self._gather_requests(found)
        peers = parts.peers.ready()
        found.add("kvxfer_peers", len(peers))
        for peer in peers[:MAX_PEERS_TOLD]:
            if peer.lane is not None and peer.lane_gbps > 0:
                rate = peer.lane_gbps * 1e9
                found.add("kvxfer_lane_bytes_per_second", rate, peer=peer.name, lane=str(peer.lane))
        for name, count in self.turned_away().items():
            found.add(f"kvxfer_{name}_total", count)
        return found

    def _gather_cache(self, parts: WorkerParts, found: Samples) -> None:
        cache, retired = parts.engine.cache, parts.residency.retired
        sizes = {
            "reserved": cache.reserved_bytes,
            "committed": cache.committed_bytes,
            "registered": parts.growth.regions.total_bytes,
            "budget": parts.engine.budget.kv_bytes,
            "tombstone": retired.tombstone_bytes,
            "pinned": retired.pinned_bytes,
        }
        for name, size in sizes.items():
            found.add(f"kvxfer_cache_{name}_bytes", size)
        found.add_tally("kvxfer_growth_seconds", parts.growth.seconds)
        found.add("kvxfer_growth_failures_total", parts.growth.num_failed)
        counts = parts.engine.pools.counts()
        for state in ("free", "used", "quarantined", "cached"):
            found.add("kvxfer_blocks", getattr(counts, state), state=state)

    def _gather_requests(self, found: Samples) -> None:
        if self.prefix_tokens is not None:
            queries, hits = self.prefix_tokens()
            found.add("kvxfer_prefix_cache_queries_total", queries)
            found.add("kvxfer_prefix_cache_hits_total", hits)
        if self.num_preemptions is not None:
            found.add("kvxfer_num_preemptions_total", self.num_preemptions())
        for reason, count in self._ended.items():
            found.add("kvxfer_requests_total", count, reason=reason)
        running, waiting = self.load()
        found.add("kvxfer_num_requests_running", running)
        found.add("kvxfer_num_requests_waiting", waiting)


def unready(parts: WorkerParts) -> str:
    """Why this worker takes no new requests, or ''."""
    if parts.draining.reason:
        return f"draining: {parts.draining.reason}"
    return "asleep" if parts.residency.state is ResidencyState.ASLEEP else ""


def _version() -> str:
    try:
        return version("kvxfer")
    except PackageNotFoundError:
        return "unknown"
