"""torch views [B, H, N, C] of each layer of a group, over the whole reservation.

The views span the capacity, not what is committed: they are made once and stay valid through
growth. Touching a block at or beyond the committed bound is a fault.
"""

from __future__ import annotations

import torch

from kvxfer.cache.layout import GroupGeometry
from kvxfer.memory.extensible_tensor import ExtensibleTensor


def layer_views(tensor: ExtensibleTensor, geometry: GroupGeometry) -> list[torch.Tensor]:
    """One view [capacity_blocks, H, N, C] per layer; they alias the reservation."""
    spec = geometry.spec
    layer_stride, *strides = geometry.strides
    shape = (geometry.capacity_blocks, spec.num_kv_heads, spec.block_size, spec.content_dim)
    return [
        tensor.view(shape, tuple(strides), geometry.offset + layer * layer_stride)
        for layer in range(spec.num_layers)
    ]
