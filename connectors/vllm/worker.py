"""The worker's half: brings vLLM's tensors to a service, and passes steps and outcomes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from connectors.vllm.handover import RankAddress, Step
from connectors.vllm.layout import VllmCache
from connectors.vllm.service import Outcome, Service, Setup
from kvxfer.errors import KvxferError, MemoryPinned

logger = logging.getLogger(__name__)

Describe = Callable[[Mapping[str, torch.Tensor]], tuple[VllmCache, Setup]]


class Worker:
    """The model's thread."""

    def __init__(self, describe: Describe) -> None:
        """`describe`: what to start a service with, by the tensors. Raises UsageError."""
        self._describe = describe
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._service: Service | None = None
        self._unserved: list[Step] = []
        self._block_size = 1
        """The scheduler's, once known."""

    @property
    def address(self) -> RankAddress | None:
        return self._service.address if self._service else None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Raises UsageError for tensors, or options, that will not do; ConnectorError."""
        self._stop()
        cache, setup = self._describe(kv_caches)
        service = Service(setup, cache)
        service.start()
        self._block_size = cache.block_size * cache.ratio
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
        """The tensors' memory may go when this has returned. Idempotent. Raises MemoryPinned where
        a consumer that was lost, and may live, has never let go of it."""
        service = self._stop()
        if service is not None and service.silent:
            names = ", ".join(sorted(service.silent))
            raise MemoryPinned(f"the KV cache's memory must stay: {names} may still read it")

    def shut_down(self) -> None:
        """The process ends. Idempotent; what does not end in time is logged."""
        try:
            self._stop()
        except KvxferError as error:
            logger.warning("shutdown: %s", error)

    def _stop(self) -> Service | None:
        service, self._service = self._service, None
        if service is not None:
            service.stop()
        return service

    def restore(self) -> None:
        """After `release`: the same tensors have memory again."""
        if self._service is None and self._kv_caches:
            self.register(self._kv_caches)

    def tell(self, step: Step) -> None:
        if self._service is not None:
            self._service.tell(step)
        else:
            self._unserved.append(step)

    def take(self) -> Outcome:
        """While nothing is registered, what was told has failed."""
        outcome = self._service.take() if self._service else Outcome()
        unserved, self._unserved = self._unserved, []
        for step in unserved:
            outcome.sent.update(offer.request_id for offer in step.offers)
            for load in step.loads:
                outcome.fail(load, "no KV cache is registered", load.start // self._block_size)
        return outcome

    def take_stats(self) -> dict[str, list[float]] | None:
        return self._service.stats.take() if self._service else None
