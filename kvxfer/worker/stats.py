"""Adding up the movements of one hand-over."""

from __future__ import annotations

from kvxfer.control.router_messages import TransferStats
from kvxfer.worker.transfer_thread import Movement


def add_movement(stats: TransferStats, movement: Movement) -> TransferStats:
    """`stats` with one more ticket that ended; the span reaches from the first to the last."""
    return TransferStats(
        num_bytes=stats.num_bytes + movement.num_bytes,
        num_runs=stats.num_runs + movement.num_runs,
        num_tickets=stats.num_tickets + 1,
        busy_ns=stats.busy_ns + movement.end_ns - movement.start_ns,
        start_ns=min(stats.start_ns or movement.start_ns, movement.start_ns),
        end_ns=max(stats.end_ns, movement.end_ns),
    )
