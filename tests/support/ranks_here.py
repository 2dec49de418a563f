"""A worker of several ranks whose parts are all in this process: real caches, loopback agents and
the table of calls, but neither processes nor a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from support.faulty import FaultyDriver, SlowLoopback
from support.workers import GRANULARITY, SPEC, make_engine

from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.config import WorkerOptions
from kvxfer.model.tensor_parallel import TensorParallel
from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.multi import MultiConnector
from kvxfer.worker.engine import Engine
from kvxfer.worker.rank_host import RankHost
from kvxfer.worker.rank_methods import METHODS
from kvxfer.worker.rank_wire import decode, encode
from kvxfer.worker.ranked_transfer import RankedTransfer
from kvxfer.worker.ranks import RankGroup


class RanksHere(RankGroup):
    """Calls reach all hosts one after the other, as the wire would bring them."""

    def __init__(self, hosts: list[RankHost]) -> None:
        self.hosts = hosts
        self.host = hosts[0]
        self.size = len(hosts)

    def call(self, name: str, *arguments: Any, own: Callable[[], Any] | None = None) -> list[Any]:
        method = METHODS[name]
        found = [own() if own else method.run(self.host, *arguments)]
        for host in self.hosts[1:]:
            result = method.run(host, *decode(encode(arguments), method.arguments))
            found.append(decode(encode(result), method.result))
        return found

    def check(self) -> None:
        """Nothing here can die alone."""

    def close(self) -> None:
        for host in self.hosts[1:]:
            host.cache.close()


@dataclass(frozen=True)
class EngineHere(Engine):
    def close(self) -> None:
        super().close()
        assert self.group is not None
        self.group.close()


def share_of(spec: KVCacheSpec, size: int) -> KVCacheSpec:
    """What each of `size` ranks holds of a model of `spec`."""
    if spec.kind is GroupKind.MLA:
        return spec
    heads = spec.num_kv_heads
    return replace(spec, num_kv_heads=max(1, heads // size), replicas=max(1, size // heads))


def ranked_engine(
    size: int, role: str, spec: KVCacheSpec = SPEC, **more: Any
) -> Callable[[WorkerOptions, str], Engine]:
    """Makes the engine of a worker of `size` ranks, of a model of `spec`; `more` as
    `make_engine`'s. For `Worker(engine=…)`."""

    def make(options: WorkerOptions, incarnation: str) -> Engine:
        engine = make_engine(options, incarnation, specs=[share_of(spec, size)], role=role, **more)
        hosts = [
            RankHost(TensorParallel(rank, size, Path("/nowhere")), "cpu") for rank in range(size)
        ]
        for rank, host in enumerate(hosts):
            host._specs = engine.specs
            host._cache, connector = (engine.cache, engine.connector)
            if rank:
                host._cache = KVCache(FaultyDriver(GRANULARITY), engine.cache.geometry)
                host._cache.extend([1])
                connector = _connector(f"{options.worker_id}.{incarnation}.{rank}", host, role)
            host._transfer = host._transfer_over(connector)
        group = RanksHere(hosts)
        bases = [host.cache.buffer.base_address for host in hosts]
        known = {one.name: getattr(engine, one.name) for one in fields(engine)}
        known |= {"transfer": RankedTransfer(group, ["loopback"], bases), "group": group}
        return EngineHere(**known)

    return make


def _connector(name: str, host: RankHost, role: str) -> MultiConnector:
    cache = host.cache
    window = MemoryWindow(
        cache.buffer.base_address, cache.geometry.total_bytes, "cpu", cache.buffer
    )
    initiates = Direction.PULL if role == "decode" else Direction.PUSH
    return MultiConnector({"loopback": SlowLoopback(name, window)}, initiates)
