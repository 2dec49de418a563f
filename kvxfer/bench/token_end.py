"""One of the two processes of `kvxfer bench beside`: an engine under a load that the bench
controls, prefill at the source or decode at the target, and KV that moves beside it."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from typing import TypeVar

from kvxfer.bench.token_engine import LONGEST_WAIT_S, EngineHost, fail
from kvxfer.bench.token_flow import Flow, Piece, pieces_of
from kvxfer.bench.token_load import DecodeLoad, Load, PrefillLoad
from kvxfer.bench.token_phase import EngineContact, EngineSetup, Phase, Sample, gaps_within
from kvxfer.bench.transfer_fill import clear, fill, is_filled
from kvxfer.config import WorkerOptions, resolve
from kvxfer.control.facts import RankFacts
from kvxfer.errors import KvxferError, UsageError
from kvxfer.memory.limits import host_identity
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.lanes import Lane, LaneSide, offered
from kvxfer.transfer.plan import TransferPlan, plan_groups
from kvxfer.transfer.sides import cache_sides
from kvxfer.worker.transfer_thread import Movement

T = TypeVar("T")

DRAIN_TIMEOUT_S = 60.0
PEER = "peer"
SEED = 77
WHOLE = 1 << 62
"""Bytes that no set has."""


class EngineEnd:
    """The source's or the target's. Control thread only; `undo` gives everything back."""

    def __init__(
        self, role: str, device: str, setup: EngineSetup, pipe: Connection, undo: ExitStack
    ) -> None:
        self._is_source = role == "source"
        self._setup = setup
        self._peer: EngineContact | None = None
        self._lane: Lane | None = None
        self._plans: dict[int, TransferPlan] = {}
        initiates = Direction.PUSH if self._is_source else Direction.PULL
        self._host = EngineHost(worker_options(role, device, setup), initiates, pipe, undo)
        self._spec, *others = self._host.engine.specs
        if others:
            reason = f"has {1 + len(others)} groups of layers: one is meant"
            raise UsageError("model", str(setup.model), reason)
        places = list(range(1, self._host.num_blocks))
        random.Random(SEED + self._is_source).shuffle(places)
        blocks = iter(places)
        held = [
            self._take(blocks, tokens)
            for tokens in ([setup.chunk_tokens] if self._is_source else self._lengths())
        ]
        self._background = tuple(self._take(blocks, setup.chunk_tokens) for _ in range(setup.sets))
        self._on_views(clear, places)  # a GPU's fresh memory may be NaN
        self._load = self._host.in_model(partial(self._make_load, held))

    def _lengths(self) -> list[int]:
        setup = self._setup
        return [setup.context_tokens + setup.cycle_tokens] * setup.sequences

    def _take(self, blocks: Iterator[int], num_tokens: int) -> tuple[int, ...]:
        """At random places; raises UsageError when there are too few."""
        count = -(-num_tokens // self._spec.block_size)
        taken = tuple(islice(blocks, count))
        if len(taken) < count:
            reason = f"{self._host.num_blocks} blocks are too few for what decodes and what moves"
            raise UsageError("kv_mib", self._setup.kv_bytes >> 20, reason)
        return taken

    def _make_load(self, held: Sequence[Sequence[int]]) -> Load:
        setup, engine = self._setup, self._host.engine
        source, vocabulary = random.Random(SEED), range(engine.info.vocab_size)
        if self._is_source:
            tokens = source.choices(vocabulary, k=setup.chunk_tokens)
            return PrefillLoad(engine.runner, held[0], tokens)
        prompts = [source.choices(vocabulary, k=setup.context_tokens) for _ in held]
        return DecodeLoad(engine.runner, held, prompts, setup.chunk_tokens, setup.cycle_tokens)

    # --- what the parent asks -----------------------------------------------------------------

    def contact(self) -> EngineContact:
        engine = self._host.engine
        lanes = tuple(offered(engine.connector.connectors, self._setup.lane))
        return EngineContact(
            base_address=engine.cache.buffer.base_address,
            geometry=engine.cache.geometry,
            regions=self._host.regions,
            description=self._host.description,
            invitation=engine.connector.invite(),
            side=LaneSide(lanes, host_identity(), engine.driver.device),
            background=self._background,
        )

    def connect(self, peer: EngineContact) -> frozenset[str]:
        """Which connectors of ours may start transfers with `peer` now."""
        self._peer = peer
        ranks = [RankFacts(peer.base_address, peer.description, [peer.invitation])]
        try:
            return self._host.result_of(partial(self._host.transfer.connect, PEER, ranks))
        except KvxferError as error:
            self._host.say(f"no transfers are started here: {error}")
            return frozenset()

    def use(self, lane: Lane) -> None:
        """KV moves by `lane`, whichever end starts it."""
        self._lane = lane

    def write(self) -> None:
        """Contents for what moves."""
        for index, blocks in enumerate(self._background):
            self._on_views(fill, blocks, index + 1)

    def erase(self) -> None:
        for blocks in self._background:
            self._on_views(clear, blocks)

    def wrong_sets(self) -> int:
        """Of what moves, how many sets are not what `write` writes."""
        sets = enumerate(self._background)
        return [self._on_views(is_filled, ids, index + 1) for index, ids in sets].count(False)

    def rest(self) -> None:
        """No transfer of the other end is under way any more."""
        self._host.transfer.serving = False

    def measure(self, phase: Phase) -> Sample:
        """Compute from the phase's beginning to its end, and move KV if that is ours to do."""
        host, flow = self._host, self._flow(phase)
        ends_s: list[float] = []
        outputs: list[tuple[int, ...]] = []
        is_over = False

        def took(tokens: tuple[int, ...]) -> None:
            nonlocal is_over
            ends_s.append(time.monotonic())
            outputs.append(tokens)
            is_over = ends_s[-1] >= phase.end_s
            if not is_over:
                host.model.submit(self._load.step, took, fail)

        host.in_model(self._load.reset)
        host.transfer.serving = phase.gbps != 0
        while (ahead_s := phase.start_s - time.monotonic()) > 0:
            host.turn(ahead_s)
        host.model.submit(self._load.step, took, fail)
        while not is_over:
            elapsed_s = time.monotonic() - phase.start_s
            if flow is not None:
                flow.pump(elapsed_s)
            host.turn(LONGEST_WAIT_S if flow is None else flow.wait_s(elapsed_s))
        if flow is not None:
            host.until(flow.drain, DRAIN_TIMEOUT_S, "the end of transfers in the background")
        gbps = flow.gbps(phase.window) if flow is not None else 0.0
        return Sample(gaps_within(ends_s, phase.window), tuple(outputs), gbps)

    # --- moving -------------------------------------------------------------------------------

    def _flow(self, phase: Phase) -> Flow | None:
        """None where nothing moves, or the other end starts it."""
        assert self._lane is not None, "the parent chooses one first"
        if phase.gbps == 0 or self._is_source != (self._lane.direction is Direction.PUSH):
            return None
        setup = self._setup
        least = WHOLE if phase.gbps is None else setup.kv_stream_bytes
        pieces = pieces_of(self._spec, setup.sets, setup.chunk_tokens, least)
        return Flow(pieces, self._plan, self._move, phase.gbps, setup.in_flight)

    def _plan(self, piece: Piece) -> TransferPlan:
        """As a worker, which plans a chunk once and takes the layers that are due out of that."""
        plan = self._plans.get(piece.set_index)
        if plan is None or piece.layers.start == 0:
            plan = self._plans[piece.set_index] = self._whole_plan(piece.set_index)
        return plan.of_layers([piece.layers])

    def _whole_plan(self, place: int) -> TransferPlan:
        assert self._peer is not None
        tokens, peer = self._setup.chunk_tokens, self._peer
        ours = cache_sides(
            self._host.engine.cache.geometry, self._host.regions, [self._background[place]], tokens
        )
        theirs = cache_sides(peer.geometry, peer.regions, [peer.background[place]], tokens)
        source, target = (ours, theirs) if self._is_source else (theirs, ours)
        return plan_groups(source, target, [range(tokens)])

    def _move(self, plan: TransferPlan, ended: Callable[[Movement], None]) -> None:
        assert self._lane is not None
        self._host.transfer.move(PEER, self._lane, plan, ended)

    def _on_views(self, act: Callable[..., T], blocks: Sequence[int], *more: int) -> T:
        engine = self._host.engine
        return engine.on_device(lambda: act(engine.cache.views[0], blocks, *more))


def worker_options(role: str, device: str, setup: EngineSetup) -> WorkerOptions:
    """Resolved, as a worker's."""
    return resolve(
        WorkerOptions(
            model=setup.model,
            worker_id=role,
            device=device,
            kv_cache_layout=setup.layout,
            block_size=setup.block_size,
            max_num_seqs=setup.sequences,
            max_num_batched_tokens=setup.chunk_tokens,
            kv_cache_memory_bytes=setup.kv_bytes,
            connector=setup.connector,
            lane=setup.lane,
            threads=setup.threads,
        ),
        role,
    )


def serve_engine(pipe: Connection, role: str, device: str, environment: Mapping[str, str]) -> None:
    """A process's main."""
    del environment  # nothing is added to ours
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle: it closes the pipe
    serve(pipe, role, device)
    sys.stdout.flush()
    os._exit(0)  # all is given back: taking the interpreter apart, torch and all, takes seconds


def serve(pipe: Connection, role: str, device: str) -> None:
    """An engine as the first message describes it, then answers, until the parent closes its end of
    `pipe`."""
    try:
        with ExitStack() as undo:
            setup: EngineSetup = pipe.recv()
            end = _answer(pipe, lambda: EngineEnd(role, device, setup, pipe, undo), True)
            while end is not None:
                verb, arguments = pipe.recv()
                _answer(pipe, partial(getattr(end, verb), *arguments))
    except (EOFError, OSError):
        return  # the parent has gone


def _answer(pipe: Connection, run: Callable[[], T], is_start: bool = False) -> T | None:
    """Send what `run` returns, or its error; returns it, None after an error."""
    try:
        found = run()
    except KvxferError as error:
        pipe.send((True, str(error)))
        return None
    pipe.send((False, None if is_start else found))
    return found
