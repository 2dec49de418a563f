"""Inside a worker of vLLM (--worker-extension-cls): what its KV blocks hold, as digests.

Facts relied on (vLLM 0.32, read and run): an extension's methods join the worker's class, and
POST /collective_rpc calls them where VLLM_SERVER_DEV_MODE=1; `model_runner.kv_caches` are the
layers' caches in order, each a view [B, H, N, C] whatever the memory's layout, so that blocks of
two engines compare as values, in one order.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch


class KvDigests:
    """Mixed into vLLM's worker; has no state."""

    model_runner: Any

    def kv_block_digests(self) -> list[str]:
        """Of each block, over all layers; '' for one that holds nothing but zeros."""
        caches: list[torch.Tensor] = self.model_runner.kv_caches
        return [_digest([cache[block] for cache in caches]) for block in range(len(caches[0]))]


def _digest(pages: list[torch.Tensor]) -> str:
    if not any(bool(page.any()) for page in pages):
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for page in pages:
        values = page.detach().cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
