"""A worker's prefix cache, as its options and its model have it."""

from __future__ import annotations

import logging

from kvxfer.cache.prefix_cache import PrefixCache, why_no_prefix_cache
from kvxfer.worker.assembly import WorkerParts

logger = logging.getLogger(__name__)


def make_prefix_cache(parts: WorkerParts) -> PrefixCache:
    """On if it is wanted and the model allows; says so where it does not."""
    specs, is_wanted = parts.engine.specs, parts.options.enable_prefix_caching
    why_not = why_no_prefix_cache(specs)
    if is_wanted and why_not:
        logger.info("prefix cache: off, %s", why_not)
    return PrefixCache(parts.engine.pools, specs, is_on=is_wanted)


def prefix_status(cache: PrefixCache) -> dict[str, int]:
    """Its part of Status, by vLLM's names."""
    return {
        "prefix_cache_hit_tokens": cache.hit_tokens,
        "prefix_cache_query_tokens": cache.query_tokens,
    }
