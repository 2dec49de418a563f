"""The model's steps, as the roles submit them: a step that runs out of memory gets a second try.

An elastic cache may hold memory that no request uses. When the model's own allocations fail, that
is given back (`Residency.trim`) and the step runs once more: it writes the same KV to the same
blocks, so a second run changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvxfer.control.cache_messages import CacheState
from kvxfer.errors import KvxferError, ModelOutOfMemory
from kvxfer.worker.residency import Residency
from kvxfer.worker.work_thread import WorkThread

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ModelSteps:
    """Control thread only; `done` and `failed` are called in it, one of them once."""

    def __init__(self, model: WorkThread, residency: Residency, is_elastic: bool) -> None:
        self._model = model
        self._residency = residency
        self._is_elastic = is_elastic

    def submit(
        self,
        run: Callable[[], T],
        done: Callable[[T], None],
        failed: Callable[[KvxferError], None],
    ) -> None:
        def retry(error: KvxferError) -> None:
            if not self._is_elastic or not isinstance(error, ModelOutOfMemory):
                failed(error)
                return
            logger.warning("%s: giving back what of the cache is unused, then once more", error)
            self._residency.trim(partial(again, error))

        def again(error: KvxferError, state: CacheState) -> None:
            if state.problem:
                logger.warning("nothing was given back: %s", state.problem)
                failed(error)
            else:
                self._model.submit(run, done, failed)

        self._model.submit(run, done, retry)
