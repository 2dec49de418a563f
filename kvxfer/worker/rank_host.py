"""What each rank of a tensor-parallel worker owns, and the closed table of what can be asked of it.

All ranks get the same calls in the same order, line by line; a line is served by one thread of its
own, so that KV is moved and memory committed while the model computes. A new kind of call is a
method of RankHost and a row of METHODS.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.cache.budget import open_files_needed
from kvxfer.cache.kv_cache import Extension, KVCache
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.errors import CacheError, ModelError
from kvxfer.memory.chunks import LARGEST_CHUNK
from kvxfer.memory.driver import VmmDriver
from kvxfer.memory.fixed import FixedDriver
from kvxfer.memory.limits import ensure_open_files
from kvxfer.model.loader import inspect_model
from kvxfer.model.packing import SequenceStep
from kvxfer.model.runner import ModelRunner
from kvxfer.model.tensor_parallel import TensorParallel
from kvxfer.transfer.digest import prompt_digests
from kvxfer.worker.device import make_driver


class LineName(enum.StrEnum):
    """Each has a thread of its own in every rank: in rank 0 the one that calls."""

    MODEL = "model"
    TRANSFER = "transfer"


@dataclass(frozen=True, slots=True)
class RankCache:
    """A rank's cache, as its Hello tells it: the same strides everywhere, other addresses."""

    geometry: CacheGeometry
    base_address: int
    committed_blocks: tuple[int, ...]


class RankHost:
    """One rank's runner and cache. Owns both; which thread may call what is in METHODS."""

    def __init__(self, place: TensorParallel, device: str) -> None:
        self.place = place
        self.device = device
        self._runner: ModelRunner | None = None
        self._cache: KVCache | None = None
        self._specs: tuple[KVCacheSpec, ...] = ()
        self._pending: Extension | None = None

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise ModelError("no model was loaded")
        return self._runner

    @property
    def cache(self) -> KVCache:
        if self._cache is None:
            raise CacheError("no cache was reserved")
        return self._cache

    def enter_thread(self) -> None:
        """As `Engine.enter_thread`; first in every thread that serves a line."""
        if self.device != "cpu":
            import torch

            torch.cuda.set_device(self.device)

    def load(self, model: str, dtype: str | None, threads: int) -> None:
        """As `ModelRunner.load`, of the directory `model`."""
        if self._runner is not None:
            raise ModelError("a model is loaded already")
        info = inspect_model(Path(model))
        self._runner = ModelRunner.load(info, self.device, dtype, threads, self.place)

    def probe_specs(self, block_size: int) -> tuple[KVCacheSpec, ...]:
        """Those of this rank's heads."""
        self._specs = self.runner.probe_specs(block_size)
        return self._specs

    def reserve(self, layouts: list[KVCacheLayout], capacities: list[int]) -> RankCache:
        """Addresses for `capacities` blocks of each group, a granule per segment committed, and the
        runner bound to it. Errors as `CacheGeometry.build` and `KVCache.extend`."""
        if self._cache is not None:
            raise CacheError("a cache is reserved already")
        driver = self._driver()
        geometry = CacheGeometry.build(self._specs, layouts, capacities, driver.granularity)
        if driver.device == "cpu":
            groups = geometry.groups
            ensure_open_files(
                sum(open_files_needed(one, one.capacity_blocks, LARGEST_CHUNK) for one in groups)
            )
        cache = KVCache(driver, geometry)
        try:
            cache.extend([1] * len(capacities))
            self.runner.bind(cache.views)
        except BaseException:
            cache.close()
            raise
        self._cache = cache
        return self.describe()

    def describe(self) -> RankCache:
        cache = self.cache
        return RankCache(cache.geometry, cache.buffer.base_address, cache.committed_blocks)

    def warm_up(self, max_tokens: int, max_batch: int, max_context: int | None) -> None:
        self.runner.warm_up(max_tokens, max_batch, max_context)

    def prefill_chunk(self, step: SequenceStep) -> int | None:
        return self.runner.prefill_chunk(step)

    def decode_step(self, steps: list[SequenceStep]) -> list[int]:
        return self.runner.decode_step(steps)

    def prompt_digests(self, tables: list[BlockTable], num_prompt: int) -> list[str]:
        """Of this rank's heads."""
        return prompt_digests(self.cache, tables, num_prompt)

    def prepare(self, num_blocks: list[int]) -> tuple[int, ...]:
        """First half of a growth: commit memory, and return the blocks of each group that it backs.
        They may be used after `confirm`; errors as `KVCache.extend`."""
        if self._pending is not None:
            raise CacheError("a growth is prepared already")
        self._pending = self.cache.extend(num_blocks)
        return self._pending.new_blocks

    def confirm(self) -> None:
        """All ranks have prepared: the growth stays."""
        self._pending = None

    def retract(self) -> None:
        """Take back what was prepared, if anything was."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self.cache.retract(pending)

    def close(self) -> None:
        """Idempotent."""
        if self._runner is not None:
            self._runner.close()
        if self._cache is not None:
            self._cache.close()

    def _driver(self) -> VmmDriver:
        found = make_driver(self.device)
        return FixedDriver(self.device) if isinstance(found, str) else found


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table: what runs, and the types that travel."""

    run: Callable[..., Any]
    """Of a RankHost, first argument."""
    arguments: Any
    """A tuple type."""
    result: Any
    line: LineName
    timeout_s: float
    """From the call to the last rank's reply."""
    is_collective: bool = False
    """The ranks wait for one another in it: when some fail, all are out of step for good."""


_MODEL, _TRANSFER = LineName.MODEL, LineName.TRANSFER
_START_S = 900.0
"""Reading a large model, recording its graphs."""
_MEMORY_S = 600.0
"""The host populates about 1 GiB a second."""
_STEP_S = 300.0
"""Longer than the deadline of a collective, whose error says more."""
_BRIEF_S = 30.0

METHODS: Mapping[str, Method] = {
    "load": Method(
        RankHost.load, tuple[str, str | None, int], None, _MODEL, _START_S, is_collective=True
    ),
    "probe_specs": Method(
        RankHost.probe_specs,
        tuple[int],
        tuple[KVCacheSpec, ...],
        _MODEL,
        _STEP_S,
        is_collective=True,
    ),
    "reserve": Method(
        RankHost.reserve, tuple[list[KVCacheLayout], list[int]], RankCache, _MODEL, _MEMORY_S
    ),
    "warm_up": Method(
        RankHost.warm_up, tuple[int, int, int | None], None, _MODEL, _START_S, is_collective=True
    ),
    "prefill_chunk": Method(
        RankHost.prefill_chunk,
        tuple[SequenceStep],
        int | None,
        _MODEL,
        _STEP_S,
        is_collective=True,
    ),
    "decode_step": Method(
        RankHost.decode_step,
        tuple[list[SequenceStep]],
        list[int],
        _MODEL,
        _STEP_S,
        is_collective=True,
    ),
    "prompt_digests": Method(
        RankHost.prompt_digests, tuple[list[BlockTable], int], list[str], _MODEL, _STEP_S
    ),
    "describe": Method(RankHost.describe, tuple[()], RankCache, _TRANSFER, _BRIEF_S),
    "prepare": Method(RankHost.prepare, tuple[list[int]], tuple[int, ...], _TRANSFER, _MEMORY_S),
    "confirm": Method(RankHost.confirm, tuple[()], None, _TRANSFER, _BRIEF_S),
    "retract": Method(RankHost.retract, tuple[()], None, _TRANSFER, _MEMORY_S),
}
