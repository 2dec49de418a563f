"""What a trial of lanes found, for people: never a silent slow path."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cache

from kvxfer.control.session import Peer
from kvxfer.transfer.ceilings import FLOOR_SHARE, Ceiling, ceiling_between, measure_memcpy, why_slow
from kvxfer.transfer.lanes import Lane
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.lane_trial import GPU_BYTES, HOST_BYTES, first_group

logger = logging.getLogger(__name__)


class LaneReport:
    """Logs the choice, and warns below the floor."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._memcpy = cache(measure_memcpy)  # some milliseconds, once

    def tell(self, peer: Peer, lane: Lane, gbps: Mapping[Lane, float], num_tokens: int) -> None:
        found, ceiling = gbps[lane], self._ceiling(peer)
        against = ""
        if ceiling is not None:
            against = f", {found / ceiling.gbps:.2f} of {ceiling.gbps:.3g} ({ceiling.source})"
        others = [f"{other} {rate:.3g}" for other, rate in gbps.items() if other != lane]
        tried = f"; also tried: {', '.join(others)}" if others else ""
        theirs, ours = self._sizes(peer)
        where = f" from {theirs} to {ours} ranks" if max(theirs, ours) > 1 else ""
        logger.info(
            "lane to %s: %s at %.3g GB/s%s%s%s", peer.name, lane, found, where, against, tried
        )
        if ceiling is not None and self._is_telling(num_tokens):
            self._warn_if_slow(peer, lane, found, ceiling)

    def _ceiling(self, peer: Peer) -> Ceiling | None:
        facts = peer.facts
        assert facts is not None
        device_id, host = self._parts.engine.device_id, self._parts.host
        devices, paths = (device_id, facts.device_id), self._num_paths(peer)
        return ceiling_between(*devices, host == facts.host, self._memcpy, paths)

    def _num_paths(self, peer: Peer) -> int:
        """What all bytes pass through: the ranks of the smaller side, each with a GPU of its own;
        on the host no more than can copy at the same time."""
        narrow = min(self._sizes(peer))
        if self._parts.engine.driver.device != "cpu":
            return narrow
        return min(narrow, len(os.sched_getaffinity(0)))

    def _sizes(self, peer: Peer) -> tuple[int, int]:
        """Ranks, of prefill and of us."""
        assert peer.facts is not None
        return peer.facts.tensor_parallel_size, self._parts.engine.size

    def _is_telling(self, num_tokens: int) -> bool:
        """Whether enough was moved to judge by."""
        spec = first_group(self._parts).spec
        wanted = HOST_BYTES if self._parts.engine.driver.device == "cpu" else GPU_BYTES
        return num_tokens // spec.block_size * spec.block_bytes >= wanted // 2

    def _warn_if_slow(self, peer: Peer, lane: Lane, found: float, ceiling: Ceiling) -> None:
        if found >= FLOOR_SHARE * ceiling.gbps:
            return
        pipelined = os.environ.get("UCX_RMA_PPLN_ENABLE", "") in ("y", "yes", "on", "1")
        on_gpu = self._parts.engine.driver.device != "cpu"
        logger.warning(
            "lane to %s is slow: %s at %.3g GB/s, less than half of %.3g (%s): %s",
            peer.name,
            lane,
            found,
            ceiling.gbps,
            ceiling.source,
            why_slow(lane.connector, lane.direction, on_gpu, pipelined),
        )
