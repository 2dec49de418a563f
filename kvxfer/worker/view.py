"""What a router is shown of a worker, made when it asks (`control.view_messages`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike

from kvxfer.cache.block_states import BlockState, counts, mark, runs
from kvxfer.control.view_messages import (
    MAX_LANES,
    MAX_RANGES,
    MAX_RUNS,
    MAX_UNDER_WAY,
    GroupView,
    LaneView,
    RequestView,
    TransferView,
    View,
    ViewQuery,
)
from kvxfer.telemetry.trace import now_ns
from kvxfer.worker.assembly import WorkerParts
from kvxfer.worker.residency import ResidencyState
from kvxfer.worker.trails import Trails

LONGEST_TEXT = 200
InFlight = Callable[[], Iterable[Sequence[Sequence[int]]]]
"""Of each request that a transfer or a peer may be at work on: its blocks, group by group."""


def joined_ranges(offsets: ArrayLike, sizes: ArrayLike, most: int) -> list[tuple[int, int]]:
    """What sorted, disjoint ranges cover, neighbours as one: at most `most` of them, for which the
    narrowest gaps are filled."""
    starts = np.asarray(offsets, np.int64)
    ends = starts + np.asarray(sizes, np.int64)
    if not len(starts):
        return []
    gaps = starts[1:] - ends[:-1]
    is_kept = gaps > 0
    if np.count_nonzero(is_kept) >= most:
        is_kept = np.zeros(len(gaps), bool)
        is_kept[np.argsort(gaps)[len(gaps) - most + 1 :]] = True
    firsts = starts[np.concatenate(([True], is_kept))]
    lasts = ends[np.concatenate((is_kept, [True]))]
    return list(zip(firsts.tolist(), (lasts - firsts).tolist(), strict=True))


class WorkerView:
    """Answers ViewQuery. Control thread only."""

    def __init__(
        self, role: str, parts: WorkerParts, in_flight: InFlight, num_requests: Callable[[], int]
    ) -> None:
        self._role = role
        self._parts = parts
        self._in_flight = in_flight
        self._num_requests = num_requests
        self.trails = Trails()
        """To be told of each request that comes."""
        self.handlers: dict[type, Callable[[str, ViewQuery], None]] = {ViewQuery: self._on_query}

    def _on_query(self, key: str, query: ViewQuery) -> None:
        self._parts.peers.send(key, self.make(query.asked_ns))

    def make(self, asked_ns: int) -> View:
        parts, engine = self._parts, self._parts.engine
        cache, regions = engine.cache, parts.growth.regions
        committed = cache.buffer.committed
        starts, sizes = [one.offset for one in committed], [one.size for one in committed]
        retired, log = parts.residency.retired, parts.transfer.log
        return View(
            worker_id=parts.options.worker_id,
            role=self._role,
            asked_ns=asked_ns,
            now_ns=now_ns(),
            num_ranks=engine.size,
            device=engine.driver.device,
            base_address=cache.buffer.base_address,
            reserved_bytes=cache.reserved_bytes,
            committed_bytes=cache.committed_bytes,
            registered_bytes=regions.total_bytes,
            budget_bytes=engine.budget.kv_bytes,
            tombstone_bytes=retired.tombstone_bytes,
            pinned_bytes=retired.pinned_bytes,
            is_sleeping=parts.residency.state is ResidencyState.ASLEEP,
            generation=regions.generation,
            epoch=parts.residency.epoch,
            committed=joined_ranges(starts, sizes, MAX_RANGES),
            registered=joined_ranges(regions.starts, regions.ends - regions.starts, MAX_RANGES),
            groups=self._groups(),
            lanes=self._lanes(),
            num_transfers=log.num_ended,
            transferred_bytes=log.num_bytes,
            transfers=self._transfers(),
            num_requests=self._num_requests(),
            requests=[
                RequestView(one.request_id[:LONGEST_TEXT], one.peer, list(one.states))
                for one in self.trails
            ],
        )

    def _groups(self) -> list[GroupView]:
        engine, found = self._parts.engine, []
        in_flight = list(self._in_flight())
        for index, geometry in enumerate(engine.cache.geometry.groups):
            states = engine.pools.groups[index].states()
            touched = chain.from_iterable(blocks[index] for blocks in in_flight if blocks)
            mark(states, touched, BlockState.IN_FLIGHT, BlockState.USED)
            scale, cells = runs(states, MAX_RUNS)
            found.append(
                GroupView(
                    kind=str(geometry.spec.kind),
                    layout=str(geometry.layout),
                    block_size=geometry.spec.block_size,
                    block_bytes=geometry.spec.block_bytes,
                    offset=geometry.offset,
                    num_segments=geometry.num_segments,
                    segment_bytes=geometry.segment_stride_bytes,
                    segment_block_bytes=geometry.segment_block_bytes,
                    capacity=geometry.capacity_blocks,
                    committed=engine.cache.committed_blocks[index],
                    usable=len(states),
                    counts=counts(states),
                    blocks_per_cell=scale,
                    cells=cells,
                )
            )
        return found

    def _lanes(self) -> list[LaneView]:
        ready = self._parts.peers.ready()[:MAX_LANES]
        return [LaneView(peer.name, str(peer.lane), peer.lane_gbps) for peer in ready]

    def _transfers(self) -> list[TransferView]:
        found = []
        for one in self._parts.transfer.log.newest(MAX_UNDER_WAY):
            peer = self._parts.peers.get(one.peer)
            name = peer.name if peer else one.peer
            times = one.start_ns, one.end_ns
            error = one.error[:LONGEST_TEXT]
            found.append(
                TransferView(one.number, name, str(one.lane), *times, one.num_bytes, error)
            )
        return found
