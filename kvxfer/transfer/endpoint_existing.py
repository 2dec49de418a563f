"""Tensors that an engine has made, as the memory behind an endpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise

import torch

from kvxfer.cache.kv_cache import Extension
from kvxfer.cache.layout import AXES, CacheGeometry, GroupGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import CacheError, UsageError
from kvxfer.transfer.connector import MemoryWindow
from kvxfer.transfer.regions import Region

logger = logging.getLogger(__name__)

_MAX_SHIFT = 47


class ExistingCache:
    """One group of KV in tensors that stay the engine's: they do not grow.

    `tensors` is one tensor for all layers, its dimensions in the order of `layout`
    (BLHNC: [B, L, H, N, C]), or a list of one tensor a layer, without that dimension (LBNHC:
    [B, N, H, C]). Strides must be those of the layout: everything inside B without gaps; the
    segments outside of it at one distance from each other, their own size rounded up to any power
    of two, as allocators do. So a list must lie at ascending addresses with equal steps, as the
    parts of one allocation do; tensors anywhere else are refused. A view that permutes dimensions
    will do, it is strides that count.

    Where K and V lie apart, as in [2, B, N, H, D], describe them as layers of their own: twice as
    many, head_dim_k = D, head_dim_v = 0, on both sides.

    `has_null_block`: block 0 holds no KV, as vLLM has it; transfers of it are refused then. The
    memory must stay as long as a peer may reach it: until `Endpoint.close`, and each peer's
    `disconnect`.
    """

    connectors: tuple[str, ...] = ("nixl",)

    def __init__(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        spec: KVCacheSpec,
        layout: KVCacheLayout,
        *,
        has_null_block: bool = True,
    ) -> None:
        """Raises UsageError for what `spec` and `layout` do not describe."""
        self.first_block = int(has_null_block)
        is_one = isinstance(tensors, torch.Tensor)
        self._tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        axes = layout.value if is_one else layout.value.replace("L", "")
        _check_alike(self._tensors, spec, axes, 1 if is_one else spec.num_layers)
        strides = _strides(self._tensors, spec, axes)
        capacity = self._tensors[0].shape[axes.index("B")]
        self._base_address = self._tensors[0].data_ptr()
        self.geometry = CacheGeometry((_geometry_of(spec, layout, capacity, strides),))
        self.regions = tuple(
            Region(tensor.data_ptr() - self._base_address, _span_bytes(tensor))
            for tensor in self._tensors
        )
        self.views = [_views(self._tensors, axes)]
        self.num_blocks = (capacity,)

    @property
    def window(self) -> MemoryWindow:
        device = str(self._tensors[0].device)
        return MemoryWindow(self._base_address, self.geometry.total_bytes, device)

    def extend(self, num_blocks: Sequence[int]) -> Extension:
        raise CacheError(f"cannot grow to {list(num_blocks)} blocks: tensors brought by the engine")

    def retract(self, extension: Extension) -> None:
        raise CacheError("tensors brought by the engine do not grow")

    def above(self, num_blocks: Sequence[int]) -> tuple[Region, ...]:
        raise CacheError(f"cannot shrink to {list(num_blocks)}: tensors brought by the engine")

    def blocks_after_shrink(self, num_blocks: Sequence[int]) -> tuple[int, ...]:
        return self.num_blocks

    def shrink(self, num_blocks: Sequence[int]) -> None:
        raise CacheError(f"cannot shrink to {list(num_blocks)}: tensors brought by the engine")

    def close(self, holders: Sequence[str]) -> None:
        """The tensors stay the engine's."""
        if holders:
            logger.warning("tensors must stay while %s may reach them", ", ".join(holders))


def _check_alike(
    tensors: Sequence[torch.Tensor], spec: KVCacheSpec, axes: str, expected: int
) -> None:
    if len(tensors) != expected:
        raise UsageError("tensors", len(tensors), f"the spec has {spec.num_layers} layers")
    extents = {"L": spec.num_layers, "H": spec.num_kv_heads, "N": spec.block_size}
    extents |= {"C": spec.content_dim, "B": 1}
    first = tensors[0]
    if first.dim() == len(axes):
        extents["B"] = first.shape[axes.index("B")]
    wanted = [extents[axis] for axis in axes]
    for index, tensor in enumerate(tensors):
        if str(tensor.dtype) != f"torch.{spec.dtype}":
            raise UsageError("dtype", str(tensor.dtype), f"tensor {index} is not {spec.dtype}")
        if tensor.device.type not in ("cpu", "cuda") or tensor.device != first.device:
            reason = f"tensor {index}: all must be on one device, cpu or cuda"
            raise UsageError("device", str(tensor.device), reason)
        if list(tensor.shape) != wanted:
            named = ", ".join(f"{axis}={size}" for axis, size in zip(axes, wanted, strict=True))
            raise UsageError("tensors", tuple(tensor.shape), f"tensor {index} is not [{named}]")
        if tensor.layout != torch.strided or tensor.stride() != first.stride():
            raise UsageError("strides", str(tensor.layout), f"tensor {index} is not like the first")


def _strides(tensors: Sequence[torch.Tensor], spec: KVCacheSpec, axes: str) -> dict[str, int]:
    """Bytes along each axis of more than one element."""
    first = tensors[0]
    found = {
        axis: stride * first.itemsize
        for axis, stride, size in zip(axes, first.stride(), first.shape, strict=True)
        if size > 1
    }
    if "L" not in axes and spec.num_layers > 1:
        addresses = [tensor.data_ptr() for tensor in tensors]
        steps = {b - a for a, b in pairwise(addresses)}
        if len(steps) != 1 or min(steps) <= 0:
            reason = "layers must lie at ascending addresses with equal steps: make them of one " \
                "allocation, or give one tensor for all"  # fmt: skip
            raise UsageError("tensors", f"steps of {sorted(steps)[:4]} bytes", reason)
        found["L"] = steps.pop()
    return found


def _geometry_of(
    spec: KVCacheSpec, layout: KVCacheLayout, capacity: int, strides: dict[str, int]
) -> GroupGeometry:
    """That of the layout with these strides, its segments padded to some power of two."""
    for shift in range(_MAX_SHIFT):
        geometry = GroupGeometry.build(spec, layout, capacity, 1 << shift)
        theirs = dict(zip(AXES, geometry.strides, strict=True))
        if all(theirs[axis] == stride for axis, stride in strides.items()):
            return geometry
        if (1 << shift) > max(strides.values(), default=0):
            break
    dense = GroupGeometry.build(spec, layout, capacity, 1)
    wanted = dict(zip(AXES, dense.strides, strict=True))
    raise UsageError(
        "strides",
        strides,
        f"{layout} has {wanted} bytes, segments padded to a power of two at most",
    )


def _span_bytes(tensor: torch.Tensor) -> int:
    """From the first byte to the last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize


def _views(tensors: Sequence[torch.Tensor], axes: str) -> list[torch.Tensor]:
    rest = axes.replace("L", "")
    order = [rest.index(axis) for axis in "BHNC"]
    layers = tensors if "L" not in axes else tensors[0].unbind(axes.index("L"))
    return [layer.permute(order) for layer in layers]
