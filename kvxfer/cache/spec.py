"""What the layers of one group share: the shape of their KV."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.errors import UsageError

DTYPE_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes per element of each dtype a cache may hold, by torch's names."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of one group of layers; block `b` of layer `l` is [H, N, C] with C = K then V."""

    num_layers: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: str
    block_size: int
    """Tokens per block."""

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim_k", "block_size"):
            if getattr(self, field) < 1:
                raise UsageError(field, getattr(self, field), "must be at least 1")
        if self.head_dim_v < 0:
            raise UsageError("head_dim_v", self.head_dim_v, "must not be negative")
        if self.dtype not in DTYPE_SIZES:
            raise UsageError("dtype", self.dtype, f"must be one of {', '.join(DTYPE_SIZES)}")

    @property
    def content_dim(self) -> int:
        """C: elements of one head and token, K then V."""
        return self.head_dim_k + self.head_dim_v

    @property
    def itemsize(self) -> int:
        return DTYPE_SIZES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """What one block occupies in one layer."""
        return self.num_kv_heads * self.block_size * self.content_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        """What one block occupies in all layers."""
        return self.num_layers * self.page_bytes

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
