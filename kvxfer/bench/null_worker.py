"""How a worker without a model is put together. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.worker.process import Setting

if TYPE_CHECKING:
    from kvxfer.worker.assembly import StartEngine


def _load_start() -> StartEngine:
    from kvxfer.bench.null_engine import start_null_engine

    return start_null_engine


NULL = Setting(load_start=_load_start)
