"""What `/status` tells: each worker's state, cache, queues and lanes, as structs for both ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from kvxfer.launch.supervisor import Kept
    from kvxfer.serve.backend import Backend


class Cache(msgspec.Struct, frozen=True):
    """A worker's KV cache, of each rank; 0 where it has not said yet."""

    reserved_bytes: int
    committed_bytes: int
    registered_bytes: int
    budget_bytes: int
    generation: int
    layout: str
    blocks_total: int
    blocks_free: int
    blocks_used: int
    blocks_quarantined: int
    blocks_cached: int
    is_sleeping: bool


class LaneRate(msgspec.Struct, frozen=True):
    """How KV comes to a worker from `peer`; the rate is that of its trial."""

    peer: str
    lane: str
    gbps: float


class Worker(msgspec.Struct, frozen=True):
    """A worker as the router sees it."""

    id: str
    """Its worker id; its address until it has said who it is."""
    role: str
    address: str
    state: str
    """greeting (not there, or not yet), ready or draining."""
    device: str
    tensor_parallel_size: int
    num_requests: int
    """That it has: decode: of all routers; prefill: prompts on their way."""
    num_queued: int
    """... of which wait."""
    cache: Cache
    lanes: list[LaneRate]
    refused: list[str]
    """Why peers that it was told to work with do not fit."""


class WorkerProcess(msgspec.Struct, frozen=True):
    """A process that `kvxfer serve` or `kvxfer launch` keeps running."""

    name: str
    pid: int
    state: str
    num_restarts: int
    last_end: str


class Overview(msgspec.Struct, frozen=True):
    model: str
    num_requests: int
    """Completions under way in this router."""
    is_draining: bool
    workers: list[Worker]
    processes: list[WorkerProcess]
    """Of `kvxfer serve` and `kvxfer launch`; empty where workers were started by others."""


def overview(
    model: str,
    num_requests: int,
    is_draining: bool,
    backends: Iterable[Backend],
    supervised: Iterable[Kept] = (),
) -> Overview:
    """Pure."""
    workers = sorted(map(_worker, backends), key=lambda one: (one.role != "prefill", one.id))
    processes = [
        WorkerProcess(one.plan.name, one.pid, one.state.value, one.num_restarts, one.last_end)
        for one in supervised
    ]
    return Overview(model, num_requests, is_draining, workers, processes)


def _worker(backend: Backend) -> Worker:
    values, facts = backend.status, backend.facts
    return Worker(
        id=backend.name,
        role=backend.role,
        address=backend.address,
        state=backend.state.name.lower(),
        device=facts.device if facts else "",
        tensor_parallel_size=facts.tensor_parallel_size if facts else 0,
        num_requests=_whole(values, "requests") + _whole(values, "jobs"),
        num_queued=_whole(values, "queued"),
        cache=_cache(values),
        lanes=_lanes(values),
        refused=[str(value) for key, value in values.items() if key.startswith("refused ")],
    )


def _cache(values: Mapping[str, Any]) -> Cache:
    return Cache(
        reserved_bytes=_whole(values, "reserved_bytes"),
        committed_bytes=_whole(values, "committed_bytes"),
        registered_bytes=_whole(values, "registered_bytes"),
        budget_bytes=_whole(values, "budget_bytes"),
        generation=_whole(values, "generation"),
        layout=str(values.get("layout", "")),
        blocks_total=_whole(values, "blocks_total"),
        blocks_free=_whole(values, "blocks_free"),
        blocks_used=_whole(values, "blocks_used"),
        blocks_quarantined=_whole(values, "blocks_quarantined"),
        blocks_cached=_whole(values, "prefix_cache_blocks"),
        is_sleeping=bool(values.get("is_sleeping", 0)),
    )


def _lanes(values: Mapping[str, Any]) -> list[LaneRate]:
    found = []
    for key, lane in values.items():
        if key.startswith("lane "):
            peer = key.removeprefix("lane ")
            rate = values.get(f"lane_gbps {peer}", 0.0)
            found.append(LaneRate(peer, str(lane), float(rate)))
    return sorted(found, key=lambda one: one.peer)


def _whole(values: Mapping[str, Any], name: str) -> int:
    """A worker's word is a peer's: what is no number counts as not said."""
    value = values.get(name, 0)
    return int(value) if isinstance(value, int | float) else 0
