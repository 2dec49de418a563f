"""What the transfers that a worker started came to, by connector and direction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvxfer.telemetry.families import TRANSFER_S
from kvxfer.telemetry.metrics import Samples, Tally
from kvxfer.transfer.lanes import Lane

if TYPE_CHECKING:
    from kvxfer.worker.transfer_thread import Movement


@dataclass(slots=True)
class _Counts:
    num_bytes: int = 0
    num_runs: int = 0
    num_failed: int = 0
    seconds: Tally = field(default_factory=lambda: Tally(TRANSFER_S))


class TransferCounts:
    """Control thread only."""

    def __init__(self) -> None:
        self._lanes: dict[Lane, _Counts] = {}

    def add(self, lane: Lane, movement: Movement) -> None:
        """A transfer by `lane` ended."""
        counts = self._lanes.get(lane)
        if counts is None:
            counts = self._lanes[lane] = _Counts()
        if movement.error is not None:
            counts.num_failed += 1
            return
        counts.num_bytes += movement.num_bytes
        counts.num_runs += movement.num_runs
        counts.seconds.observe(movement.elapsed_ns / 1e9)

    def gather(self, into: Samples) -> None:
        for lane, counts in self._lanes.items():
            labels = {"connector": lane.connector, "direction": str(lane.direction)}
            into.add("kvxfer_transfer_bytes_total", counts.num_bytes, **labels)
            into.add("kvxfer_transfer_descriptors_total", counts.num_runs, **labels)
            into.add("kvxfer_transfer_failures_total", counts.num_failed, **labels)
            into.add_tally("kvxfer_transfer_seconds", counts.seconds, **labels)
