"""vLLM's interface, KVConnectorBase_V1, on the two halves."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connectors.vllm import compat
from connectors.vllm.handover import RankAddress, Step
from connectors.vllm.layout import LayerGroup, VllmCache, describe, page_format
from connectors.vllm.messages import Facts
from connectors.vllm.metrics import KvxferPromMetrics, KvxferStats
from connectors.vllm.options import Options
from connectors.vllm.ranks import shares_of
from connectors.vllm.scheduler import Scheduler
from connectors.vllm.service import Outcome, Setup
from connectors.vllm.worker import Worker
from kvxfer.cache.layout import KVCacheLayout
from kvxfer.errors import UsageError
from kvxfer.transfer.endpoint import HeadShard
from kvxfer.transfer.shards import head_range

logger = logging.getLogger(__name__)


@dataclass
class StepMetadata(KVConnectorMetadata):
    step: Step = field(default_factory=Step)


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    address: RankAddress


class KvxferConnector(KVConnectorBase_V1, SupportsHMA):
    """One of two: the scheduler's half, or a worker's; `_scheduler` or `_worker` is None."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises UsageError for options, a version of vLLM, or a model that will not do."""
        compat.check_version()
        compat.log_as_vllm_does()
        super().__init__(vllm_config, role, kv_cache_config)
        compat.check_config(vllm_config)
        transfer = vllm_config.kv_transfer_config
        options = Options.resolve(transfer.kv_connector_extra_config, os.environ)
        groups = compat.layer_groups(kv_cache_config)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._outcome = Outcome()
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(
                transfer.engine_id,
                kv_cache_config.transfer_group_ids,
                [(group.window, group.block_size) for group in groups if group.window],
                is_producer=transfer.is_kv_producer,
                is_consumer=transfer.is_kv_consumer,
            )
            return
        options.keys()  # a fault in them is told before memory is taken
        if transfer.is_kv_producer:
            options.address(0)
        self._worker = Worker(partial(_describe, vllm_config, options, groups))

    # ---- worker

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._as_worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        address = self._as_worker.address
        return HandshakeMetadata(address) if address else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self._as_worker.tell(metadata.step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request waits, outside of any step, until all of its KV is there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: KV is read where it lies."""

    def wait_for_save(self) -> None:
        """Nothing: see `save_kv_layer`."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        outcome = self._outcome = self._as_worker.take()
        failed = set(outcome.failed) if self._has_groups else set()
        return KVConnectorTransferResults(outcome.sent, outcome.loaded, failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        outcome = self._outcome = self._as_worker.take()
        return outcome.sent or None, outcome.loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of what `get_transfer_results` returned last. Where there are several groups block ids
        say nothing: vLLM is told the requests then."""
        invalid, self._outcome.invalid_blocks = self._outcome.invalid_blocks, set()
        return set() if self._has_groups else invalid

    def get_kv_connector_stats(self) -> KvxferStats | None:
        data = self._worker.take_stats() if self._worker else None
        return KvxferStats(data) if data else None

    def release_kv_caches(self) -> None:
        """Before the cache's memory goes to sleep."""
        self._as_worker.release()

    def unregister_kv_caches(self) -> None:
        self._as_worker.release()

    def get_mem_pool_context(self) -> None:
        """None: vLLM's own allocator. This is where growable memory would come in, had vLLM a block
        count that grows; see README.md."""

    def restore_kv_caches(self) -> None:
        """After it has woken up, at the same addresses."""
        self._as_worker.restore()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shut_down()

    # ---- scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._as_scheduler.num_new_matched_tokens(request, num_computed_tokens)

    def on_new_request(self, request: Any) -> None:
        self._as_scheduler.on_new_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._as_scheduler.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return StepMetadata(self._as_scheduler.take_step())

    def update_connector_output(self, connector_output: Any) -> None:
        self._as_scheduler.loads_ended(connector_output.finished_recving or set())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._as_scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._as_scheduler.request_finished(request, block_ids)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        ranks = {rank: told.address for rank, told in metadata.items()}
        self._as_scheduler.set_ranks(ranks)

    # ---- of the class

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """What the option kv_cache_layout says; None: any will do, and vLLM chooses."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return Options.resolve(extra, os.environ).kv_cache_layout or None

    @classmethod
    def supports_sleep_mode(cls, *args: Any) -> bool:
        """While the cache sleeps nothing of it is registered, and no lease on it holds."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvxferStats | None:
        return KvxferStats(data) if data else None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvxferPromMetrics:
        return KvxferPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- ours

    @property
    def _has_groups(self) -> bool:
        return len(self._kv_cache_config.kv_cache_groups) > 1

    @property
    def _as_worker(self) -> Worker:
        assert self._worker is not None, "called on the scheduler's half"
        return self._worker

    @property
    def _as_scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "called on a worker's half"
        return self._scheduler


def _describe(
    config: Any,
    options: Options,
    groups: list[LayerGroup],
    kv_caches: Mapping[str, torch.Tensor],
) -> tuple[VllmCache, Setup]:
    """What a worker's service is started with. Raises UsageError."""
    layout = KVCacheLayout.parse(
        "kv_cache_layout", config.cache_config.get_resolved_kv_cache_layout().name
    )
    form = page_format(compat.backend_names(config, groups))
    cache = describe(kv_caches, groups, layout, form, config.cache_config.cache_dtype)
    rank, size = compat.tensor_parallel_rank(), config.parallel_config.tensor_parallel_size
    total = compat.num_kv_heads(config, groups)
    heads = head_range(rank, size, total)
    if len(heads) != groups[0].num_kv_heads:
        reason = f"rank {rank} of {size} has {groups[0].num_kv_heads} of {total}, not {len(heads)}"
        raise UsageError("num_kv_heads", total, reason)
    transfer = config.kv_transfer_config
    facts = Facts(
        engine_id=transfer.engine_id,
        incarnation=secrets.token_hex(8),
        rank=rank,
        size=size,
        model=config.model_config.model,
        page_format=cache.page_format,
        block_size=cache.block_size,
        layers=[list(group.names) for group in cache.groups],
    )
    setup = Setup(
        options=options,
        facts=facts,
        port_offset=compat.port_offset(config, rank),
        shard=HeadShard(heads.start, total),
        is_producer=transfer.is_kv_producer,
        is_consumer=transfer.is_kv_consumer,
        shares=lambda producer_size: shares_of(rank, size, producer_size, total),
    )
    return cache, setup
