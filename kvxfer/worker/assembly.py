"""Puts the parts of a worker together, runs its control loop, and takes it apart again."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvxfer.config import WorkerOptions
from kvxfer.control.channel import Channel
from kvxfer.control.facts import RankFacts, WorkerFacts
from kvxfer.control.resync_messages import RegionsAt
from kvxfer.errors import WorkerDied
from kvxfer.memory.limits import host_identity
from kvxfer.telemetry.spans import NO_SPANS, Spans, open_spans
from kvxfer.telemetry.trace import Trace
from kvxfer.transfer.connector import Direction, Where, load_connectors
from kvxfer.transfer.lanes import AUTO, Lane, offered, served
from kvxfer.worker.conservation import Conservation
from kvxfer.worker.draining import Draining
from kvxfer.worker.engine import Engine, start_engine
from kvxfer.worker.growth import CacheGrowth
from kvxfer.worker.heap import freeze_heap
from kvxfer.worker.loop import ControlLoop, Role
from kvxfer.worker.mailbox import Mailbox
from kvxfer.worker.metrics import WorkerMetrics
from kvxfer.worker.metrics_server import MetricsServer
from kvxfer.worker.peers import PeerTable
from kvxfer.worker.process import Announcer, handle_signals
from kvxfer.worker.residency import Residency, ResidencyState
from kvxfer.worker.steps import ModelSteps
from kvxfer.worker.transfer_thread import TransferThread
from kvxfer.worker.watermarks import Watermarks
from kvxfer.worker.work_thread import Report, WorkThread

logger = logging.getLogger(__name__)

FIRST_EXTENSION_TIMEOUT_S = 600.0
"""The host populates about 1 GiB a second."""
STOP_TIMEOUT_S = 0.5
"""For each thread, so that a worker is gone within 2 s of Ctrl-C; then the process just ends."""

FAREWELL_TIMEOUT_S = 1.0
"""For answers to the last words of a worker that has drained: what it said before is there then."""


@dataclass(frozen=True)
class WorkerParts:
    """What every worker is made of; a role adds its own state machine on top."""

    options: WorkerOptions
    engine: Engine
    growth: CacheGrowth
    residency: Residency
    draining: Draining
    peers: PeerTable
    transfer: TransferThread
    model: WorkThread
    steps: ModelSteps
    """What the roles give the model to do, but for reading KV."""
    watermarks: Watermarks
    trace: Trace
    spans: Spans
    metrics: WorkerMetrics
    conservation: Conservation
    host: str
    """Identity of the running kernel."""

    def set_busy(self, busy: bool) -> None:
        """Told at every turn whether any request is here."""
        self.conservation.tick(busy)
        self.transfer.serving = busy

    def status(self) -> dict[str, int | float | str]:
        """The cache in numbers, as Status tells them."""
        cache, counts = self.engine.cache, self.engine.pools.counts()
        return {
            "tensor_parallel_size": self.engine.size,
            "reserved_bytes": cache.reserved_bytes,
            "committed_bytes": cache.committed_bytes,
            "registered_bytes": self.growth.regions.total_bytes,
            "generation": self.growth.regions.generation,
            "regions": len(self.growth.regions.regions),
            "base_address": cache.buffer.base_address,
            "revocations": self.residency.epoch,
            "is_sleeping": int(self.residency.state is ResidencyState.ASLEEP),
            "tombstone_bytes": self.residency.retired.tombstone_bytes,
            "pinned_bytes": self.residency.retired.pinned_bytes,
            "retired_agents": self.residency.retired.num_epochs,
            "budget_bytes": self.engine.budget.kv_bytes,
            "blocks_total": counts.total,
            "blocks_free": counts.free,
            "blocks_used": counts.used,
            "blocks_quarantined": counts.quarantined,
            "prefix_cache_blocks": counts.cached,
            "is_draining": int(bool(self.draining.reason)),
            "peers": len(self.peers.ready()),
            **{f"lane {peer.name}": str(peer.lane) for peer in self.peers.ready()},
            **{f"lane_gbps {peer.name}": peer.lane_gbps for peer in self.peers.ready()},
            **{f"refused {p.key}": str(p.refusal) for p in self.peers.dialled() if p.refusal},
            "layout": ",".join(group.layout for group in cache.geometry.groups),
        }


MakeRole = Callable[[WorkerParts], Role]
StartEngine = Callable[..., Engine]
"""As `start_engine`, which it is but for workers without a model."""


def serve(
    role: str,
    options: WorkerOptions,
    incarnation: str,
    channel: Channel,
    dial: Sequence[str],
    make_role: MakeRole,
    announcer: Announcer,
    start: StartEngine = start_engine,
) -> None:
    """Start up and run the control loop until a signal, or until it has drained. The channel
    stays the caller's."""
    with contextlib.ExitStack() as undo:
        trace = Trace(options.worker_id, options.trace)
        undo.callback(trace.close)
        spans = open_spans(options.otlp_traces_endpoint, role, options.worker_id)
        undo.callback(spans.close)
        server = _metrics_server(options, undo)
        connectors = load_connectors(options.connector)
        initiates = Direction.PULL if role == "decode" else Direction.PUSH
        engine = start(options, connectors, incarnation, announcer.step, initiates=initiates)
        reports: Mailbox[Report] = Mailbox()
        undo.callback(reports.close)
        parts = _assemble(role, options, engine, channel, reports, trace, incarnation, spans)
        made = make_role(parts)
        loop = ControlLoop(
            channel,
            reports,
            parts.peers,
            parts.growth,
            parts.residency,
            parts.watermarks,
            made,
            parts.draining,
            options.worker_id,
            engine.check,
            trace.flush,
        )
        parts.metrics.listen(parts, loop)
        undo.callback(_stop, parts)
        parts.transfer.start()
        parts.model.start()
        _first_extension(parts, loop, announcer)
        if server is not None:
            parts.metrics.serve(parts, server, reports)
        for address in dial:
            parts.peers.dial(address)
        freeze_heap()
        announcer.ready()
        with handle_signals(parts.draining.stop):
            loop.run()
        reason = parts.draining.reason or "it was told to stop"
        parts.peers.farewell(reason, is_quiet=parts.draining.is_clean)
        deadline_s = time.monotonic() + FAREWELL_TIMEOUT_S * parts.draining.is_clean
        while time.monotonic() < deadline_s and not parts.peers.is_alone:
            loop.turn(0.02)


def _metrics_server(options: WorkerOptions, undo: contextlib.ExitStack) -> MetricsServer | None:
    """Bound now, so that a port that is taken is told before the model is loaded."""
    if not options.metrics_port:
        return None
    server = MetricsServer(options.metrics_host, options.metrics_port)
    undo.callback(server.close)
    return server


def _assemble(
    role: str,
    options: WorkerOptions,
    engine: Engine,
    channel: Channel,
    reports: Mailbox[Report],
    trace: Trace,
    incarnation: str,
    spans: Spans = NO_SPANS,
) -> WorkerParts:
    transfer = TransferThread(engine.transfer, reports, engine.enter_thread)
    growth = CacheGrowth(engine, transfer, trace)

    host = host_identity()
    facts = _facts(role, options, engine, growth, incarnation, host)
    peers = PeerTable(options, channel, transfer, facts)
    growth.on_publish = peers.exchange.publish
    peers.where = lambda: RegionsAt(growth.epoch, growth.regions.generation)
    model = WorkThread("model", reports, engine.enter_thread)
    residency = Residency(engine, transfer, growth, peers, trace)
    draining = Draining(options, peers)
    may_trim = options.kv_commit == "elastic" and engine.size == 1
    steps = ModelSteps(model, residency, may_trim)
    watermarks = Watermarks(options, engine, growth, residency)
    return WorkerParts(
        options,
        engine,
        growth,
        residency,
        draining,
        peers,
        transfer,
        model,
        steps,
        watermarks,
        trace,
        spans,
        WorkerMetrics(),
        Conservation(engine.pools),
        host,
    )


def _facts(
    role: str,
    options: WorkerOptions,
    engine: Engine,
    growth: CacheGrowth,
    incarnation: str,
    host: str,
) -> Callable[[int], WorkerFacts]:
    """What this worker tells of itself, anew for each peer: with invitations for so many ranks."""
    lanes, local = _lanes(engine, options)

    def facts(num_invited: int) -> WorkerFacts:
        ranks = zip(
            engine.transfer.base_addresses,
            growth.descriptions,
            engine.transfer.invite(num_invited),
            strict=True,
        )
        return WorkerFacts(
            role=role,
            worker_id=options.worker_id,
            incarnation=incarnation,
            model=engine.info.fingerprint,
            geometry=engine.cache.geometry,
            ranks=[RankFacts(*rank) for rank in ranks],
            lanes=[str(lane) for lane in lanes],
            local_lanes=[str(lane) for lane in local],
            host=host,
            tests_lanes=options.lane_test,
            device=engine.driver.device,
            device_id=engine.device_id,
            regions=list(growth.regions.regions),
            generation=growth.regions.generation,
            epoch=growth.epoch,
            max_model_len=engine.max_model_len,
        )

    return facts


def _lanes(engine: Engine, options: WorkerOptions) -> tuple[list[Lane], list[Lane]]:
    """What is on offer, and what of it to workers of this host only. The user's word is above what
    may harm a peer, with a warning."""
    connectors = engine.transfer.connectors
    lanes = offered(connectors, options.lane)
    safe, apart = (served(connectors, lanes, where) for where in Where)
    if options.lane == AUTO:
        return safe, [lane for lane in safe if lane not in apart]
    for lane in lanes:
        if lane not in safe:
            logger.warning(
                "lane: %s: over TCP its owner sends what is read, and may be ended by UCX when the "
                "reader dies: push is safe, and quicker",
                lane,
            )
    return lanes, []


def _first_extension(parts: WorkerParts, loop: ControlLoop, announcer: Announcer) -> None:
    """Step 4 of the start: what may be used is committed and registered before anyone is told. A
    peer that met it earlier would find no block to try lanes with."""
    wanted = parts.engine.initial_blocks
    announcer.step(f"committing and registering {', '.join(map(str, wanted))} blocks")
    parts.growth.request(wanted)
    deadline_s = time.monotonic() + FIRST_EXTENSION_TIMEOUT_S
    while not parts.growth.is_idle:
        if time.monotonic() > deadline_s:
            raise WorkerDied(f"the first extension took over {FIRST_EXTENSION_TIMEOUT_S:g} s")
        loop.turn_deaf(0.05)
    if min(parts.engine.pools.num_blocks) < 2:
        raise WorkerDied("the first extension of the KV cache failed; see the log above")


def _stop(parts: WorkerParts) -> None:
    """End the threads, then give back the memory that they may touch."""
    parts.transfer.close_connector()
    stopped = [thread.stop(STOP_TIMEOUT_S) for thread in (parts.model, parts.transfer)]
    if all(stopped) and parts.transfer.is_closed:
        parts.engine.close()
    else:
        logger.warning("a thread or a transfer is still at work: its memory ends with the process")
