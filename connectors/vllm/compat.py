"""vLLM, as far as the connector needs it: this module, `connector` and `metrics` alone import it.

What differs between the supported versions is told apart here. Facts, read in 0.32.0; of 0.33 what
its public sources show of the connector's interface:
- 0.33 calls `release_kv_caches` and `restore_kv_caches` around sleep, if `supports_sleep_mode`.
- A spec's subclasses change what a page holds, so a class that is not named here is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import MambaSpec, UniformTypeKVCacheSpecs

from connectors.vllm.layout import LayerGroup
from kvxfer.errors import UsageError

SUPPORTED = ("0.32", "0.33")
_PLAIN, _FP8 = 0, 1
"""Values of vLLM's KVQuantMode: no scales, or one a tensor, beside the cache."""


def check_version(version: str = vllm.__version__) -> None:
    """Raises UsageError for a version that this connector was not written for."""
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise UsageError("vllm", version, f"KvxferConnector needs one of {', '.join(SUPPORTED)}")


def check_config(config: Any) -> None:
    """Raise UsageError, which names the option, for what cannot be handed over."""
    parallel = config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise UsageError(
                name, size, "KvxferConnector hands over between tensor-parallel ranks only"
            )
    lookahead = getattr(config, "num_prefill_lookahead_tokens", 0)
    if lookahead > 1:
        reason = f"drafts {lookahead} tokens ahead of the prompt, whose KV is not handed over"
        raise UsageError("speculative_config", "multi-module MTP", reason)
    transfer = config.kv_transfer_config
    if transfer.enable_permute_local_kv:
        raise UsageError(
            "enable_permute_local_kv", True, "layouts that differ are planned, not permuted"
        )
    device = config.device_config.device_type
    if transfer.kv_buffer_device != device:
        reason = f"there is no buffer: KV moves from and to {device}, where vLLM has it"
        raise UsageError("kv_buffer_device", transfer.kv_buffer_device, reason)


def log_as_vllm_does() -> None:
    """vLLM sets up its own loggers alone: ours are to be seen beside them."""
    own = logging.getLogger("vllm")
    for name in ("connectors", "kvxfer"):
        logger = logging.getLogger(name)
        if own.handlers and not logger.handlers:
            logger.handlers, logger.propagate = list(own.handlers), False
            logger.setLevel(own.level)


def tensor_parallel_rank() -> int:
    return int(get_tensor_model_parallel_rank())


def port_offset(config: Any, rank: int) -> int:
    """Of a rank's port: engines of one data-parallel group are told the same first port."""
    parallel = config.parallel_config
    return int(parallel.data_parallel_rank * parallel.tensor_parallel_size + rank)


def backend_names(config: Any, groups: Iterable[LayerGroup]) -> list[str]:
    names = [name for group in groups for name in group.names]
    return [str(backend.get_name()) for backend in get_current_attn_backends(config, names)]


def num_kv_heads(config: Any, groups: Sequence[LayerGroup]) -> int:
    """Of the whole model; the one latent of MLA."""
    return 1 if groups[0].is_mla else int(config.model_config.get_total_num_kv_heads())


def layer_groups(kv_cache_config: Any) -> list[LayerGroup]:
    """Those that are handed over. Raises UsageError for state that is not KV blocks, or blocks
    that hold something unknown."""
    groups = kv_cache_config.kv_cache_groups
    return [_group(groups[index]) for index in kv_cache_config.transfer_group_ids]


def _group(group: Any) -> LayerGroup:
    specs = [group.kv_cache_spec]
    if isinstance(specs[0], UniformTypeKVCacheSpecs):
        specs = [specs[0].kv_cache_specs[name] for name in group.layer_names]
    found = {_of_spec(spec, tuple(group.layer_names)) for spec in specs}
    if len(found) > 1:
        shapes = sorted(one.shape for one in found)
        raise UsageError("kv_cache_groups", shapes, "the layers of a group differ in their blocks")
    return found.pop()


def _of_spec(spec: Any, names: tuple[str, ...]) -> LayerGroup:
    kind = type(spec).__name__
    if isinstance(spec, MambaSpec):
        reason = f"{names[0]} keeps state that is not KV blocks, which are all that is handed over"
        raise UsageError("model", kind, reason)
    if kind not in ("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec"):
        raise UsageError("model", kind, f"what the blocks of {names[0]} hold is not known")
    packed = spec.state_content_bytes is not None or spec.num_head_slots is not None
    if packed or spec.tokens_per_state != 1 or int(spec.kv_quant_mode) not in (_PLAIN, _FP8):
        reason = f"the blocks of {names[0]} are packed ({spec.kv_quant_mode.name})"
        raise UsageError("kv_cache_dtype", str(spec.dtype), reason)
    is_mla = kind == "MLAAttentionSpec"
    return LayerGroup(
        names=names,
        num_kv_heads=int(spec.num_kv_heads),
        head_dim_k=int(spec.head_size),
        head_dim_v=0 if is_mla else int(spec.head_size_v),
        block_size=int(spec.block_size),
        window=int(spec.sliding_window) if kind == "SlidingWindowSpec" else 0,
        is_mla=is_mla,
    )
