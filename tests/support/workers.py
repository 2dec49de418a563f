"""Whole workers inside the test's process: real channels on loopback, real threads, real host
memory and the loopback connector. Only the model is replaced, by `support.null_runner`.

The control loops are turned by the test (`support.cluster`), so a test can stop between two turns.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.faulty import FaultyDriver, SlowLoopback
from support.null_runner import VOCAB_SIZE, NullRunner

from decode.worker import DecodeWorker
from kvxfer.cache.budget import CacheBudget
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.pools import BlockPools
from kvxfer.cache.sizing import WarmUp, account_as_given
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.config import WorkerOptions, resolve
from kvxfer.control.auth import Keys
from kvxfer.control.channel import Channel
from kvxfer.memory.host import HostDriver
from kvxfer.model.loader import ModelInfo
from kvxfer.telemetry.spans import NO_SPANS, Spans
from kvxfer.telemetry.trace import Trace
from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.multi import MultiConnector
from kvxfer.worker import assembly
from kvxfer.worker.draining import DrainState
from kvxfer.worker.engine import Engine
from kvxfer.worker.loop import ControlLoop
from kvxfer.worker.mailbox import Mailbox
from kvxfer.worker.peers import PeerTable
from kvxfer.worker.rank_transfer import RankTransfer
from kvxfer.worker.transfer_thread import TransferThread
from prefill.worker import PrefillWorker

GRANULARITY = 4096
SPEC = KVCacheSpec(
    num_layers=2, num_kv_heads=2, head_dim_k=16, head_dim_v=16, dtype="float32", block_size=4
)
"""A block has 1 KiB in a layer: 4 blocks a granule where a segment is a layer."""


class IdleRole:
    """A worker that does nothing beyond being a peer."""

    def __init__(self) -> None:
        self.handlers: dict[type, Any] = {}
        self.num_ticks = 0
        self.is_serving = self.is_busy = False

    def tick(self) -> None:
        self.num_ticks += 1

    def status(self) -> dict[str, int | float | str]:
        return {"ticks": self.num_ticks}


def make_options(role: str, **changes: Any) -> WorkerOptions:
    defaults: dict[str, Any] = {
        "model": Path("none"),
        "worker_id": f"{role}-0",
        "connector": "loopback",
        "block_size": SPEC.block_size,
        "max_num_batched_tokens": 8,
        "kv_low_watermark": 0.0,
        "lane_test": False,
        "request_timeout_s": 60.0,
        "peer_timeout_s": 30.0,
    }
    return resolve(WorkerOptions(**defaults | changes), role)


def make_info(fingerprint: str = "f" * 32) -> ModelInfo:
    return ModelInfo(Path("none"), "null", "Null", 4096, VOCAB_SIZE, (), fingerprint)


def make_engine(
    options: WorkerOptions,
    incarnation: str,
    *,
    layout: str = "LBHNC",
    capacity: int = 64,
    bound: int = 0,
    specs: Sequence[KVCacheSpec] = (SPEC,),
    driver: HostDriver | None = None,
    fingerprint: str = "f" * 32,
    role: str = "decode",
    second: str = "",
) -> Engine:
    """An engine with one granule per segment committed, as after warm-up. `layout` may name one
    for each group, with commas; the budget pays for `bound` blocks (default: `capacity`) of each.
    `second` names another connector, of the same kind.
    """
    driver = driver or FaultyDriver(GRANULARITY)
    names = layout.split(",") if "," in layout else [layout] * len(specs)
    layouts, capacities = [KVCacheLayout(name) for name in names], [capacity] * len(specs)
    geometry = CacheGeometry.build(specs, layouts, capacities, driver.granularity)
    cache = KVCache(driver, geometry)
    cache.extend([1] * len(specs))
    kv_bytes = geometry.bytes_of([bound or capacity] * len(specs))
    window = MemoryWindow(cache.buffer.base_address, geometry.total_bytes, "cpu", cache.buffer)
    transport = SlowLoopback(f"{options.worker_id}.{incarnation}", window)
    initiates = Direction.PULL if role == "decode" else Direction.PUSH
    transports = {"loopback": transport}
    if second:
        transports[second] = SlowLoopback(f"{options.worker_id}.{incarnation}.{second}", window)
    connector = MultiConnector(transports, initiates)
    return Engine(
        options=options,
        info=make_info(fingerprint),
        runner=NullRunner(specs, cache.views),  # type: ignore[arg-type]
        driver=driver,
        cache=cache,
        connector=connector,
        transfer=RankTransfer(connector, cache),
        pools=BlockPools(len(specs)),
        account=account_as_given(0, WarmUp(0, 0, 0, 0), 0),
        budget=CacheBudget(geometry, kv_bytes, options.max_num_batched_tokens),
    )


MakeEngine = Callable[[WorkerOptions, str], Engine]


class Silent:
    """An announcer with nobody to tell."""

    def step(self, text: str) -> None: ...


class Worker:
    """One worker, whose control loop is turned by hand. `engine`: what `make_engine` is given, or
    what makes a real one."""

    def __init__(
        self,
        role: str,
        listen: str = "tcp://127.0.0.1:0",
        *,
        idle: bool = False,
        trace: Path | None = None,
        spans: Spans = NO_SPANS,
        engine: dict[str, Any] | MakeEngine | None = None,
        make: Callable[[assembly.WorkerParts], Any] | None = None,
        **options: Any,
    ) -> None:
        """`make`: what makes its state machine, where it is not the role's."""
        self.options = make_options(role, **options)
        self.incarnation = secrets.token_hex(4)
        keys = Keys.load(self.options.key_file, self.options.peer_keys)
        self.channel = Channel(f"{self.options.worker_id}.{self.incarnation}", listen, keys)
        if callable(engine):
            self.engine = engine(self.options, self.incarnation)
        else:
            self.engine = make_engine(self.options, self.incarnation, **engine or {})
        self.reports: Mailbox[Callable[[], None]] = Mailbox()
        self.trace = Trace(self.options.worker_id, trace)
        self.parts = assembly._assemble(
            role,
            self.options,
            self.engine,
            self.channel,
            self.reports,
            self.trace,
            self.incarnation,
            spans,
        )
        make = make or {"prefill": PrefillWorker, "decode": DecodeWorker}[role]
        self.role: Any = IdleRole() if idle else make(self.parts)
        self.loop = ControlLoop(
            self.channel,
            self.reports,
            self.parts.peers,
            self.parts.growth,
            self.parts.residency,
            self.parts.watermarks,
            self.role,
            self.parts.draining,
            self.options.worker_id,
            turned=self.trace.flush,
        )
        self.parts.metrics.listen(self.parts, self.loop)
        self.parts.transfer.start()
        self.parts.model.start()
        self._is_closed = False
        try:
            assembly._first_extension(self.parts, self.loop, Silent())  # type: ignore[arg-type]
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        return self.channel.address

    @property
    def peers(self) -> PeerTable:
        return self.parts.peers

    @property
    def transfer(self) -> TransferThread:
        return self.parts.transfer

    @property
    def connector(self) -> Any:
        """The one that moves KV."""
        return self.engine.connector.connectors["loopback"]

    @property
    def runner(self) -> Any:
        return self.engine.runner

    @property
    def cache(self) -> KVCache:
        return self.engine.cache

    @property
    def pools(self) -> BlockPools:
        return self.engine.pools

    def turn(self, timeout_s: float = 0.0) -> None:
        self.loop.turn(timeout_s)

    def serve_again(self) -> None:
        """As its next process would, where it drained; and so those that said that they drain."""
        self.parts.draining.state, self.parts.draining.reason = DrainState.SERVING, ""
        for peer in self.peers.all():
            peer.is_draining = False

    def is_idle(self) -> bool:
        held = getattr(self.role, "_requests", None) or getattr(self.role, "_jobs", None)
        counts = self.pools.counts()
        return not held and not counts.used and not counts.quarantined and self.parts.growth.is_idle

    def check_conserved(self) -> None:
        """free + used + quarantined + cached + null == total, none in use, registered ==
        committed."""
        self.pools.check_conservation()
        counts = self.pools.counts()
        assert (counts.used, counts.quarantined) == (0, 0)
        assert counts.free + counts.cached + counts.null == counts.total
        usable = zip(self.pools.num_blocks, self.cache.committed_blocks, strict=True)
        assert all(bound <= committed for bound, committed in usable)
        self.check_registered()

    def check_registered(self) -> None:
        regions = self.parts.growth.regions
        chunks = {(chunk.offset, chunk.size) for chunk in self.cache.buffer.chunks}
        assert {(region.offset, region.size) for region in regions.regions} == chunks
        assert regions.total_bytes == self.cache.committed_bytes

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if isinstance(self.runner, NullRunner):
            self.runner.release()
            self.connector.moving.set()
        self.transfer.close_connector()
        stopped = [thread.stop(5.0) for thread in (self.parts.model, self.transfer)]
        self.channel.close()
        self.reports.close()
        self.trace.close()
        assert all(stopped), "a thread did not end"
        assert self.transfer.is_closed, "the connector did not close"
        self.engine.close()
