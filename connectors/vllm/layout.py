"""vLLM's per-layer tensors as the memory behind an endpoint.

Facts (read in vLLM 0.32):
- A layer's cache is a view [B, H, N, C] of one allocation, whatever the layout; its strides are
  those of the resolved `KVCacheLayout`, whose six names are ours. C is what the attention spec says
  it is: K and V of one head and token, or the latent of MLA.
- What lies where within a block is the attention backend's: FLASH_ATTN and its like split C into K
  and V; CPU_ATTN sees [B, H, 2N, D], all K of a head before all V, so that there is no telling one
  token's bytes within a block.
- Where a backend's kernels want smaller blocks than the scheduler's, B counts those, N is theirs.
- Groups of layers (full attention, sliding windows) overlay each other: a block id belongs to one
  group at a time, and layer l of each group is at the same addresses. So they are one geometry,
  of as many layers as the largest group has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.errors import UsageError
from kvxfer.transfer.endpoint import ExistingCache

TOKENS, HALVES, LATENT = "tokens", "halves", "latent"
PAGE_FORMATS = {
    "FLASH_ATTN": TOKENS,
    "FLASH_ATTN_DIFFKV": TOKENS,
    "TRITON_ATTN": TOKENS,
    "FLEX_ATTENTION": TOKENS,
    "CPU_ATTN": HALVES,
    "FLASH_ATTN_MLA": LATENT,
    "FLASHMLA": LATENT,
    "TRITON_MLA": LATENT,
}
"""By attention backend: each token K then V; all K of a head and block, then all V; one latent."""
_FLOAT8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""By vLLM's cache dtype, where its tensors are uint8."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table, by what vLLM's spec says of each of them."""

    names: tuple[str, ...]
    num_kv_heads: int
    """Of this rank."""
    head_dim_k: int
    head_dim_v: int
    block_size: int
    """Tokens in one of the scheduler's blocks."""
    window: int = 0
    """Tokens that sliding attention sees; 0: all."""
    is_mla: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int, bool]:
        heads = (self.num_kv_heads, self.head_dim_k, self.head_dim_v)
        return (*heads, self.block_size, self.is_mla)


@dataclass(frozen=True, slots=True)
class VllmCache:
    """vLLM's cache, ready for an endpoint."""

    memory: ExistingCache
    groups: tuple[LayerGroup, ...]
    """`names` in the order of their addresses."""
    page_format: str
    ratio: int
    """Blocks of the endpoint in one of the scheduler's."""

    @property
    def block_size(self) -> int:
        """Of the endpoint, in tokens."""
        return self.memory.geometry.specs[0].block_size

    def blocks(self, ids: Sequence[int]) -> list[int]:
        """The endpoint's blocks of the scheduler's; those of the null block are 0."""
        if self.ratio == 1:
            return list(ids)
        return [one * self.ratio + part if one else 0 for one in ids for part in range(self.ratio)]


def page_format(backends: Sequence[str]) -> str:
    """Raises UsageError for an attention backend whose pages are not known, or several that
    differ."""
    unknown = sorted(set(backends) - set(PAGE_FORMATS))
    if unknown:
        known = ", ".join(PAGE_FORMATS)
        raise UsageError(
            "attention_backend", unknown[0], f"its pages are not known; those of {known} are"
        )
    found = {PAGE_FORMATS[name] for name in backends}
    if len(found) != 1:
        raise UsageError("attention_backend", sorted(set(backends)), "their pages differ")
    return found.pop()


def describe(
    kv_caches: Mapping[str, torch.Tensor],
    groups: Sequence[LayerGroup],
    layout: KVCacheLayout,
    form: str,
    cache_dtype: str = "auto",
) -> VllmCache:
    """`form`: of PAGE_FORMATS. Raises UsageError, which names what is not as it should be, for
    tensors that are not what `groups` and `layout` say."""
    _check_alike(groups)
    ordered = tuple(_by_address(group, kv_caches) for group in groups)
    largest = max(ordered, key=lambda group: len(group.names))
    _check_overlaid(ordered, largest, kv_caches)
    tensors = [_typed(kv_caches[name], cache_dtype) for name in largest.names]
    size, ratio = _kernel_blocks(largest, tensors[0])
    spec = KVCacheSpec(
        num_layers=len(tensors),
        num_kv_heads=largest.num_kv_heads,
        head_dim_k=largest.head_dim_k,
        head_dim_v=largest.head_dim_v,
        dtype=str(tensors[0].dtype).removeprefix("torch."),
        block_size=size,
        kind=GroupKind.MLA if largest.is_mla else GroupKind.FULL,
    )
    memory = ExistingCache(_arranged(tensors, layout), spec, layout)
    name = f"{form} of {size}" if form == HALVES else form
    return VllmCache(memory, ordered, name, ratio)


def _check_alike(groups: Sequence[LayerGroup]) -> None:
    if not groups:
        raise UsageError("model", "no KV cache", "there is nothing to hand over")
    shapes = {group.shape for group in groups}
    if len(shapes) > 1:
        reason = (
            "groups of layers whose blocks differ (heads, head sizes, block_size) are not supported"
        )
        raise UsageError("kv_cache_groups", sorted(shapes), reason)


def _by_address(group: LayerGroup, kv_caches: Mapping[str, torch.Tensor]) -> LayerGroup:
    missing = [name for name in group.names if name not in kv_caches]
    if missing:
        raise UsageError("kv_caches", missing[0], "vLLM has brought no tensor of this layer")
    names = sorted(group.names, key=lambda name: kv_caches[name].data_ptr())
    return LayerGroup(tuple(names), *_rest(group))


def _rest(group: LayerGroup) -> tuple[int, int, int, int, int, bool]:
    heads = (group.num_kv_heads, group.head_dim_k, group.head_dim_v)
    return (*heads, group.block_size, group.window, group.is_mla)


def _check_overlaid(
    groups: Sequence[LayerGroup], largest: LayerGroup, kv_caches: Mapping[str, torch.Tensor]
) -> None:
    for group in groups:
        for name, other in zip(group.names, largest.names, strict=False):
            if kv_caches[name].data_ptr() != kv_caches[other].data_ptr():
                reason = (
                    f"does not lie where {other} does: groups are expected to overlay each other"
                )
                raise UsageError("kv_caches", name, reason)


def _typed(tensor: torch.Tensor, cache_dtype: str) -> torch.Tensor:
    if tensor.dtype != torch.uint8:
        return tensor
    name = _FLOAT8.get(cache_dtype)
    if name is None:
        raise UsageError("kv_cache_dtype", cache_dtype, "its elements are not known")
    return tensor.view(getattr(torch, name))


def _kernel_blocks(group: LayerGroup, tensor: torch.Tensor) -> tuple[int, int]:
    """Tokens in a block of the tensors, and how many of those one of the scheduler's is."""
    if tensor.dim() != 4:
        raise UsageError("kv_caches", tuple(tensor.shape), "is not [B, H, N, C]")
    content = group.head_dim_k + group.head_dim_v
    _, heads, size, found = tensor.shape
    if (heads, found) != (group.num_kv_heads, content) or group.block_size % size:
        wanted = f"[B, {group.num_kv_heads}, N, {content}], N a divisor of {group.block_size}"
        raise UsageError(
            "kv_caches", tuple(tensor.shape), f"is not {wanted}: packed, or quantized?"
        )
    return size, group.block_size // size


def _arranged(
    tensors: Sequence[torch.Tensor], layout: KVCacheLayout
) -> torch.Tensor | list[torch.Tensor]:
    """As `ExistingCache` takes them: one a layer where L is outermost, else one for all."""
    first = tensors[0]
    if layout.is_layer_compact:
        order = ["BHNC".index(axis) for axis in layout.value[1:]]
        return [tensor.permute(order) for tensor in tensors]
    steps = {b.data_ptr() - a.data_ptr() for a, b in pairwise(tensors)} or {first.itemsize}
    if len(steps) > 1 or min(steps) % first.itemsize:
        reason = "layers of this layout lie at equal steps of whole elements"
        raise UsageError("kv_caches", sorted(steps)[:4], reason)
    step = steps.pop() // first.itemsize
    whole = first.as_strided(
        (len(tensors), *first.shape), (step, *first.stride()), first.storage_offset()
    )
    return whole.permute(["LBHNC".index(axis) for axis in layout.value])
