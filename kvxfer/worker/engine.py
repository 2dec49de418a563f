"""The start of a worker: reserve → one granule per segment → warm-up → measure.

What comes after, the extension and its registration, is ordinary growth (`worker.growth`).
The steps themselves are in `worker.start`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from kvxfer.cache.budget import CacheBudget
from kvxfer.cache.footprint import kv_tokens
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.pools import BlockPools
from kvxfer.cache.sizing import (
    MemoryAccount,
    WarmUp,
    account_after_warm_up,
    account_as_given,
    account_by_estimate,
)
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.config import WorkerOptions
from kvxfer.errors import UsageError
from kvxfer.memory.driver import VmmDriver
from kvxfer.model.loader import ModelInfo
from kvxfer.transfer.connector import Connector, Direction
from kvxfer.transfer.multi import MultiConnector
from kvxfer.worker.rank_transfer import WorkerTransfer
from kvxfer.worker.ranked_start import RankedStart
from kvxfer.worker.ranks import RankGroup
from kvxfer.worker.start import Progress, Runner, Start, WarmUpHook

logger = logging.getLogger(__name__)

T = TypeVar("T")

INITIAL_SHARE = 16
"""An elastic cache begins with one part in so many of its budget."""


@dataclass(frozen=True)
class Engine:
    """What one worker computes with and moves, warmed up and measured. Owns all of it, except
    that the connector is closed by the transfer thread. Of several ranks, `cache`, `connector` and
    `driver` are rank 0's: what is counted in blocks is so in all, what is in bytes is one rank's.
    """

    options: WorkerOptions
    info: ModelInfo
    runner: Runner
    driver: VmmDriver
    cache: KVCache
    connector: MultiConnector
    """Made before warm-up was measured, so that its memory is in the account."""
    pools: BlockPools
    account: MemoryAccount
    budget: CacheBudget
    """What the measurement pays for: growth never goes beyond."""
    transfer: WorkerTransfer
    """Of all ranks; owned by the transfer thread."""
    group: RankGroup | None = None
    """The ranks, where there are several."""

    @property
    def size(self) -> int:
        return self.transfer.size

    def check(self) -> None:
        """Raises WorkerDied when a rank is gone."""
        if self.group is not None:
            self.group.check()

    @property
    def specs(self) -> tuple[KVCacheSpec, ...]:
        return self.cache.geometry.specs

    @cached_property
    def max_model_len(self) -> int:
        """Tokens of KV that one sequence may come to in any group: the model's, the option's, the
        cache's bound."""
        limit = min(self.options.max_model_len or self.info.max_model_len, self.info.max_model_len)
        return self.budget.longest_sequence(limit)

    @cached_property
    def floors(self) -> list[int]:
        """Blocks of each group that no other group's growth takes away."""
        return self.budget.floors(self.max_model_len)

    @cached_property
    def initial_blocks(self) -> list[int]:
        """Blocks to commit before the first request: the null blocks and one more at the least."""
        shares = self.budget.shares(self.floors, self.options.max_num_seqs)
        if self.options.kv_commit == "all":
            return shares
        wanted = self.options.kv_initial_blocks
        initial = []
        for share, committed in zip(shares, self.cache.committed_blocks, strict=True):
            least = max(2, wanted or -(-share // INITIAL_SHARE), committed)
            initial.append(min(share, least))
        return initial

    def affordable(self) -> CacheBudget:
        """The budget as far as the memory goes that is free right now, measured anew."""
        if self.options.kv_cache_memory_bytes:
            return self.budget
        sharing = self.size if self.driver.device == "cpu" else 1
        spare = max(0, self.driver.memory_info().free_bytes // sharing - self.account.buffer)
        held = self.cache.geometry.bytes_of(self.cache.committed_blocks)
        return replace(self.budget, kv_bytes=min(self.budget.kv_bytes, held + spare))

    def why_too_long(self, num_prompt: int, num_new: int) -> str:
        """Why no sequence of so many tokens can ever be held here, or ''."""
        longest = max(kv_tokens(self.specs, num_prompt, num_new))
        if longest <= self.max_model_len:
            return ""
        return (
            f"prompt of {num_prompt} + max_new_tokens of {num_new} come to {longest} tokens: "
            f"this worker holds {self.max_model_len}"
        )

    def enter_thread(self) -> None:
        """Make the device's primary context current in the calling thread: CUDA keeps it by
        thread, and NIXL and the driver API use whichever is current."""
        if self.driver.device != "cpu":
            import torch

            torch.cuda.set_device(self.driver.device)

    def on_device(self, run: Callable[[], T]) -> T:
        """What `run` returns, once the device has done all of it."""
        found = run()
        if self.driver.device != "cpu":
            import torch

            torch.cuda.synchronize(self.driver.device)
        return found

    def mark(self) -> Callable[[], bool]:
        """Whether the device has done all that the calling thread gave it before now."""
        if self.driver.device == "cpu":
            return lambda: True
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.driver.device))
        return event.query

    @cached_property
    def device_id(self) -> str:
        """The GPU's name and UUID, '' for host memory."""
        if self.driver.device == "cpu":
            return ""
        import torch

        properties = torch.cuda.get_device_properties(self.driver.device)
        return f"{properties.name} {properties.uuid}"

    def close(self) -> None:
        self.runner.close()
        self.cache.close()


def start_engine(
    options: WorkerOptions,
    connectors: Mapping[str, type[Connector]],
    incarnation: str,
    progress: Progress,
    hooks: Sequence[WarmUpHook] = (),
    initiates: Direction = Direction.PULL,
    kind: type[Start] | None = None,
) -> Engine:
    """Load the model, reserve the cache, warm up, measure. Leaves nothing behind on failure.

    `connectors` by name; `initiates` says which transfers this worker starts. `hooks` are run in
    warm-up and measured: whatever else will allocate in service (S18). `kind` is how it starts,
    where not as the options say.
    """
    with ExitStack() as undo:
        kind = kind or (RankedStart if options.tensor_parallel_size > 1 else Start)
        start = kind(options, connectors, progress, undo)
        capacities = start.capacities()
        if not start.memory.policy.extensible:
            capacities = start.estimate(capacities)
        cache = start.reserve(capacities)
        before = start.meter.used_bytes(0)
        connector = start.connect(incarnation, cache, initiates)
        taken = start.transfer_bytes(connector, before)
        warm_up = start.warm_up(cache, taken, hooks)
        account = _account(start, warm_up, cache)
        engine = Engine(
            options=options,
            info=start.info,
            runner=start.runner,
            driver=start.memory.driver,
            cache=cache,
            connector=connector,
            pools=BlockPools(len(capacities)),
            account=account,
            budget=start.budget(cache.geometry, account.kv),
            transfer=start.transfer(connector, cache),
            group=start.group,
        )
        _tell(engine, start.available)
        undo.pop_all()
    return engine


def _tell(engine: Engine, available: int) -> None:
    """Log the account and what it comes to. Raises UsageError where that is no cache."""
    account = engine.account
    if engine.cache.geometry.bytes_of([2] * len(engine.specs)) > account.kv:
        reason = f"leaves {account.kv} bytes for KV, too few for 2 blocks"
        raise UsageError("memory_budget_bytes", available, reason)
    for line in account.lines():
        logger.info("memory: %s", line)
    for spec, blocks in zip(engine.specs, engine.initial_blocks, strict=True):
        size = spec.block_size
        logger.info("memory: %d blocks of %d tokens, %s, at the start", blocks, size, spec.kind)


def _account(start: Start, warm_up: WarmUp, cache: KVCache) -> MemoryAccount:
    """Step 4's bound. An explicit size is taken at its word; a fixed one cannot change any more."""
    if start.options.kv_cache_memory_bytes:
        return account_as_given(start.available, warm_up, start.options.kv_cache_memory_bytes)
    if not start.memory.policy.extensible:
        size = cache.geometry.bytes_of([g.capacity_blocks for g in cache.geometry.groups])
        estimate = account_by_estimate(start.available, warm_up)
        return replace(estimate, kv=size, note="fixed before graphs were captured")
    return account_after_warm_up(start.available, warm_up, cache.committed_bytes)
