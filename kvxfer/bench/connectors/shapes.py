"""Caches whose blocks come to runs of a wanted size, between any two layouts. Pure.

A run is what lies side by side at both ends: the axes that both layouts end in, behind B. (Between
unequal layouts one layer's last and the next one's first may be neighbours at both, and are one.)
Its extents are those of the model that other benches have (heads of 128 + 128 bf16 elements, blocks
of 16 tokens) as far as the size allows; what is left makes blocks longer, or heads wider where a
run is no more than one token of one head.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kvxfer.bench.transfer_shapes import Shape
from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.errors import UsageError

TOKEN_BYTES = 512
"""Of one head and token: the least that runs can be of."""
BLOCK_TOKENS = 16
_ITEM_BYTES = 2


@dataclass(frozen=True, slots=True)
class Ends:
    """Layouts and tensor-parallel sizes of the source and of the target."""

    source: KVCacheLayout
    target: KVCacheLayout
    source_size: int = 1
    target_size: int = 1

    def __str__(self) -> str:
        if self.source_size == self.target_size == 1:
            return f"{self.source}>{self.target}"
        return f"{self.source}/{self.source_size}>{self.target}/{self.target_size}"

    @property
    def run_axes(self) -> str:
        """Innermost axes that make a run. Where the two hold different heads, a run does not go on
        from the last common one to the next token or layer."""
        pairs = zip(
            reversed(self.source.inner_axes), reversed(self.target.inner_axes), strict=False
        )
        common = [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if self.source_size != self.target_size and "H" in common:
            common = common[: common.index("H") + 1]
        return "".join(reversed(common))


@dataclass(frozen=True, slots=True)
class ShapePair:
    """What the source and the target hold, and the heads among it that move."""

    source: Shape
    target: Shape
    num_heads: int

    @property
    def block_bytes(self) -> int:
        """That a block of them moves, of all layers."""
        spec = self.source.spec
        return spec.block_bytes // spec.num_kv_heads * self.num_heads


def shapes_of(run_bytes: int, ends: Ends, num_layers: int, num_kv_heads: int) -> ShapePair:
    """Shapes whose runs are of `run_bytes`. Raises UsageError where none are."""
    if run_bytes < TOKEN_BYTES or run_bytes % TOKEN_BYTES:
        raise UsageError("block_sizes", run_bytes, f"must be a multiple of {TOKEN_BYTES} bytes")
    ratio = max(ends.source_size, ends.target_size) // min(ends.source_size, ends.target_size)
    if ratio > num_kv_heads:
        reason = f"{num_kv_heads} KV heads cannot be shared by so many"
        raise UsageError("tensor_parallel_sizes", str(ends), reason)
    heads = num_kv_heads // ratio  # of which that with fewer of them holds all
    axes, left = ends.run_axes, run_bytes // TOKEN_BYTES
    extents = {"L": num_layers, "H": heads, "N": BLOCK_TOKENS, "C": 1}
    for axis in "NHL":
        if axis in axes:
            extents[axis] = _largest_divisor(left, extents[axis])
            left //= extents[axis]
    extents["N" if "N" in axes else "C"] *= left
    head_dim = extents["C"] * TOKEN_BYTES // _ITEM_BYTES // 2

    def shape(layout: KVCacheLayout, heads: int) -> Shape:
        spec = KVCacheSpec(extents["L"], heads, head_dim, head_dim, "bfloat16", extents["N"])
        return Shape(spec, layout)

    moving = extents["H"]
    source = moving * (ratio if ends.source_size < ends.target_size else 1)
    target = moving * (ratio if ends.target_size < ends.source_size else 1)
    return ShapePair(shape(ends.source, source), shape(ends.target, target), moving)


def _largest_divisor(value: int, limit: int) -> int:
    return next(one for one in range(min(value, limit), 0, -1) if value % one == 0)
