"""What the layers of one group share: the shape of their KV, and which of it is kept."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvxfer.errors import UsageError

DTYPE_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes per element of each dtype a cache may hold, by torch's names."""


class GroupKind(enum.StrEnum):
    """What attention does with the KV of a group."""

    FULL = "full"
    """Each token sees all before it; all are kept."""
    SLIDING = "sliding"
    """Each token sees the last `window` tokens, itself included; only those are kept."""
    MLA = "mla"
    """As FULL, of one compressed latent vector a token instead of K and V by head."""
    CROSS = "cross"
    """Decoder tokens see the encoder's, which are all there from the start."""


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
    kind: GroupKind = GroupKind.FULL
    window: int = 0
    """Of a SLIDING group, in tokens; 0 for all others."""
    replicas: int = 1
    """Neighbouring ranks of a worker that each hold the same one head, as where there are more of
    them than the model has KV heads. A latent is on all ranks, and has none."""

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_dim_k", "block_size", "replicas"):
            if getattr(self, field) < 1:
                raise UsageError(field, getattr(self, field), "must be at least 1")
        if self.head_dim_v < 0:
            raise UsageError("head_dim_v", self.head_dim_v, "must not be negative")
        if self.dtype not in DTYPE_SIZES:
            raise UsageError("dtype", self.dtype, f"must be one of {', '.join(DTYPE_SIZES)}")
        if self.kind is GroupKind.MLA and self.num_kv_heads != 1:
            raise UsageError("num_kv_heads", self.num_kv_heads, "must be 1 in an MLA group")
        if self.replicas > 1 and (self.num_kv_heads != 1 or self.kind is GroupKind.MLA):
            reason = f"cannot be those of {self.num_kv_heads} heads of a {self.kind} group"
            raise UsageError("replicas", self.replicas, reason)
        if (self.kind is GroupKind.SLIDING) != (self.window > 0) or self.window < 0:
            raise UsageError("window", self.window, f"cannot be that of a {self.kind} group")

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
        """Entries of a block table that `num_tokens` tokens come to, kept or not."""
        return -(-num_tokens // self.block_size)

    def first_seen(self, position: int) -> int:
        """The first token that a query at `position` sees."""
        return max(0, position - self.window + 1) if self.window else 0

    def kept(self, num_tokens: int) -> range:
        """The entries, whole blocks, that whatever follows `num_tokens` tokens may still read: the
        others' blocks are used again, and do not travel. May be empty."""
        end = self.num_blocks(num_tokens)
        return range(min(self.first_seen(num_tokens) // self.block_size, end), end)

    def blocks_held(self, num_tokens: int, step_tokens: int) -> int:
        """Blocks that a sequence of up to `num_tokens` tokens needs at any one time, if at most
        `step_tokens` of them are computed at once.

        With a window that is what the step's tokens and those which the first of them sees can
        touch, wherever they begin: T tokens touch at most (T + N - 2) // N + 1 blocks.
        """
        entries = self.num_blocks(num_tokens)
        if not self.window:
            return entries
        touched = self.window - 1 + step_tokens
        return min(entries, (touched + self.block_size - 2) // self.block_size + 1)
