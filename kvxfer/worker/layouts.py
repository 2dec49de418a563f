"""The layout of each group of a worker's cache: everybody's wishes, put before the one judge."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.layout_choice import Wish, choose_layouts
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.config import LAYOUT_VARIABLE, WorkerOptions
from kvxfer.model import REQUIRED_LAYOUT
from kvxfer.transfer.connector import Connector

logger = logging.getLogger(__name__)


def asked_layout(options: WorkerOptions) -> Wish:
    """What the user asks for: the flag, then the variable."""
    if options.kv_cache_layout != "auto":
        return Wish(options.kv_cache_layout, "asked for by --kv-cache-layout")
    return Wish(os.environ.get(LAYOUT_VARIABLE, ""), f"asked for by {LAYOUT_VARIABLE}")


def resolve_layouts(
    options: WorkerOptions, specs: Sequence[KVCacheSpec], connectors: Mapping[str, type[Connector]]
) -> list[KVCacheLayout]:
    """One layout for each group, each logged with its reason. Raises UsageError on a conflict."""
    named = connectors if options.is_connector_named else {}
    wishes = [(kind.preferred_layout, name) for name, kind in named.items()]
    preference, connector = next((wish for wish in wishes if wish[0]), ("", ""))
    choices = choose_layouts(
        [spec.kind for spec in specs],
        override=Wish(options.kv_cache_layout_override, "a test's override"),
        forced=Wish(REQUIRED_LAYOUT, "the attention backend"),
        asked=asked_layout(options),
        preferred=Wish(preference, f"preferred by the {connector} connector"),
    )
    for spec, choice in zip(specs, choices, strict=True):
        window = f" window of {spec.window}," if spec.window else ""
        logger.info(
            "KV cache group: %d %s layers,%s layout %s: %s",
            spec.num_layers,
            spec.kind,
            window,
            choice.layout,
            choice.reason,
        )
    return [choice.layout for choice in choices]
