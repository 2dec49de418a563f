"""A worker's engine with the speculative service on it, sized in one of the two ways.

growable   the service is a warm-up hook: what it takes is measured, then the cache is extended
fixed      the cache is sized by the estimate: a share of the device, less the models' weights, the
           drafts' KV, the profiled peak and the graphs of the profiled model; the service's own
           graphs, logits and workspaces come later and must fit in what the share leaves over

vLLM's estimate is of that kind: it loads the drafting model before it profiles, and captures some
graphs to learn their size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvxfer.bench.models import model_pair
from kvxfer.bench.scratch import NoConnector, driver_of, release_unused, use_device
from kvxfer.bench.service_load import (
    DraftSide,
    LoadShape,
    SpeculativeService,
    blocks_per_sequence,
    check_length,
    null_tables,
    spread_tables,
)
from kvxfer.bench.service_options import ServiceOptions
from kvxfer.config import WorkerOptions, resolve
from kvxfer.memory.driver import VmmDriver
from kvxfer.model.loader import inspect_model
from kvxfer.model.runner import ModelRunner
from kvxfer.transfer.connector import Connector, load_connectors
from kvxfer.worker.engine import Engine, start_engine
from kvxfer.worker.start import WarmUpHook

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServiceSetup:
    """All that a measuring process needs to know; plain values, since it crosses to one."""

    options: ServiceOptions
    model: Path
    draft: Path
    device: str
    """Resolved."""

    @property
    def shape(self) -> LoadShape:
        told = self.options
        return LoadShape(
            sequences=told.sequences,
            draft_tokens=told.draft_tokens,
            prompt_tokens=told.prompt_tokens,
            steps=told.steps,
            pass_tokens=told.max_num_batched_tokens,
        )

    def make_draft(self, undo: ExitStack) -> DraftSide:
        told = self.options
        return DraftSide(self.draft, self.device, told.threads, told.block_size, self.shape, undo)

    @property
    def connectors(self) -> dict[str, type[Connector]]:
        names = self.options.connector
        return load_connectors(names) if names else {"none": NoConnector}

    def worker_options(
        self, budget_bytes: int, utilization: float | None, extensible: bool | None
    ) -> WorkerOptions:
        told = self.options
        return resolve(
            WorkerOptions(
                model=self.model,
                worker_id="bench",
                device=self.device,
                kv_cache_layout=told.kv_cache_layout,
                block_size=told.block_size,
                max_num_seqs=told.sequences,
                max_num_batched_tokens=told.max_num_batched_tokens,
                enable_extensible_kv_cache=extensible,
                gpu_memory_utilization=utilization,
                memory_budget_bytes=budget_bytes,
                connector=told.connector or "none",
                threads=told.threads,
            ),
            "bench",
        )


@contextmanager
def service_setup(options: ServiceOptions) -> Iterator[ServiceSetup]:
    """Checked, with its models on disk for as long as the context lasts. Raises UsageError."""
    device = options.check()
    with model_pair(options.model, options.draft, device) as pair:
        setup = ServiceSetup(options, pair.target, pair.draft, device)
        for directory in (pair.target, pair.draft):
            check_length(setup.shape, inspect_model(directory).max_model_len)
        yield setup


@dataclass(frozen=True, slots=True)
class Serving:
    """A warmed up engine, its cache extended, and the service on it."""

    engine: Engine
    service: SpeculativeService

    @property
    def kv_tokens(self) -> int:
        """That the cache holds now (its first group, where there are several)."""
        blocks = self.engine.cache.committed_blocks[0] - 1  # the null block holds none
        return blocks * self.engine.specs[0].block_size

    def spread(self) -> None:
        """Let the service use blocks all over what is committed now."""
        committed = self.engine.cache.committed_blocks
        self.service.place(spread_tables(self.engine.specs, self.service.shape, committed))


def start_growable(setup: ServiceSetup, undo: ExitStack, spare: float = 0.0) -> Serving:
    """Growable: the service's load is run in warm-up, and in the account. `undo` closes.

    The cache is extended to all that was measured, less `spare` times the transient peak: room in
    which growth of everything else can be seen.
    """
    use_device(setup.device)
    made: list[SpeculativeService] = []
    drafts: list[DraftSide] = []

    def load_draft(target: ModelRunner) -> None:
        del target
        drafts.append(setup.make_draft(undo))
        drafts[0].warm_up(setup.shape)

    def serve(target: ModelRunner) -> None:
        specs = target.probe_specs(setup.options.block_size)
        tables = null_tables(specs, setup.shape)
        made.append(SpeculativeService(target, drafts[0], setup.shape, tables))
        made[0].exercise()

    hooks = (WarmUpHook("draft model", load_draft), WarmUpHook("speculative steps", serve))
    options = setup.worker_options(setup.options.memory_budget_bytes, None, True)
    engine = _started(setup, options, hooks, undo)
    _extend(engine, setup, spare)
    serving = Serving(engine, made[0])
    serving.spread()
    return serving


def start_fixed(setup: ServiceSetup, utilization: float, undo: ExitStack) -> Serving:
    """Fixed at `utilization`. The drafting model's weights and KV are there before, and known.

    `undo` closes. What does not fit raises as it does in a server, wherever that is.
    """
    use_device(setup.device)
    driver = driver_of(setup.device)
    before = driver.memory_info()
    draft = setup.make_draft(undo)
    total = int(utilization * before.total_bytes)
    budget = setup.options.memory_budget_bytes
    if setup.device != "cpu":
        budget = min(total, budget or total) - _taken(driver, before.free_bytes, setup.device)
    options = setup.worker_options(budget, utilization, False)
    engine = _started(setup, options, (), undo)
    _extend(engine, setup, 0.0)
    draft.warm_up(setup.shape)
    tables = spread_tables(engine.specs, setup.shape, engine.cache.committed_blocks)
    assert isinstance(engine.runner, ModelRunner)
    return Serving(engine, SpeculativeService(engine.runner, draft, setup.shape, tables))


def _taken(driver: VmmDriver, free_before: int, device: str) -> int:
    release_unused(device)
    return max(0, free_before - driver.memory_info().free_bytes)


def _started(
    setup: ServiceSetup, options: WorkerOptions, hooks: tuple[WarmUpHook, ...], undo: ExitStack
) -> Engine:
    """Warmed up, its account printed."""
    engine = start_engine(options, setup.connectors, "bench", _say, hooks)
    undo.callback(engine.close)
    undo.callback(engine.connector.close)
    for line in engine.account.lines():
        print(f"  {line}", flush=True)
    return engine


def _extend(engine: Engine, setup: ServiceSetup, spare: float) -> None:
    """To what the worker begins with, less the spare, but to what the load needs in any case."""
    blocks, spec = list(engine.initial_blocks), engine.specs[0]
    held = blocks_per_sequence(engine.specs, setup.shape)[0]
    least = min(blocks[0], 1 + setup.shape.sequences * held)
    blocks[0] -= int(spare * engine.account.warm_up.peak) // spec.block_bytes
    blocks[0] = max(blocks[0], least)
    engine.cache.extend(blocks)
    committed = engine.cache.committed_bytes
    print(f"  {committed / MIB:.1f} MiB of KV committed", flush=True)


def _say(text: str) -> None:
    print(f"  {text}", flush=True)
