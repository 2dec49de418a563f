"""The worker's half: brings vLLM's tensors to a service, and passes steps and outcomes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from connectors.vllm.handover import RankAddress, Step
from connectors.vllm.layout import VllmCache
from connectors.vllm.service import Outcome, Service, Setup

logger = logging.getLogger(__name__)

Describe = Callable[[Mapping[str, torch.Tensor]], tuple[VllmCache, Setup]]


class Worker:
    """The model's thread."""

    def __init__(self, describe: Describe) -> None:
        """`describe`: what to start a service with, by the tensors. Raises UsageError."""
        self._describe = describe
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._service: Service | None = None
        self._invalid_blocks: set[int] = set()

    @property
    def address(self) -> RankAddress | None:
        return self._service.address if self._service else None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Raises UsageError for tensors, or options, that will not do; ConnectorError."""
        self.release()
        cache, setup = self._describe(kv_caches)
        service = Service(setup, cache)
        service.start()
        self._kv_caches, self._service = dict(kv_caches), service
        spec = cache.memory.geometry.specs[0]
        logger.info(
            "%s: %d blocks of %d tokens in %d layers, %s, pages of %s, for %s",
            setup.facts.name,
            cache.memory.num_blocks[0],
            spec.block_size,
            spec.num_layers,
            cache.memory.geometry.groups[0].layout,
            cache.page_format,
            service.address.address if service.address else "consuming only",
        )

    def release(self) -> None:
        """The tensors' memory may go when this has returned. Idempotent."""
        service, self._service = self._service, None
        if service is not None:
            service.stop()

    def restore(self) -> None:
        """After `release`: the same tensors have memory again."""
        if self._service is None and self._kv_caches:
            self.register(self._kv_caches)

    def tell(self, step: Step) -> None:
        if self._service is not None:
            self._service.tell(step)

    def take(self) -> Outcome:
        return self._service.take() if self._service else Outcome()

    def take_stats(self) -> dict[str, list[float]] | None:
        return self._service.stats.take() if self._service else None
