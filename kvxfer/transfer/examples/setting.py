"""What both scripts of the example have in common: the model's KV, and the options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.transfer.endpoint import Endpoint

NUM_TOKENS = 512
"""Of each prompt."""
CAPACITY_TOKENS = 1 << 16
"""Addresses cost nothing."""
TIMEOUT_S = 30.0


def kv_spec(block_size: int) -> KVCacheSpec:
    return KVCacheSpec(
        num_layers=4,
        num_kv_heads=8,
        head_dim_k=64,
        head_dim_v=64,
        dtype="bfloat16",
        block_size=block_size,
    )


def options(layout: str, block_size: int, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hand KV over without kvxfer's own workers.")
    parser.add_argument("--address", default="127.0.0.1:5610", help="of the receiver's channel")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--connectors", default="peer,nixl", help="modules of connectors/")
    parser.add_argument("--layout", default=layout, help="one of the six")
    parser.add_argument("--block-size", type=int, default=block_size, help="tokens")
    return parser.parse_args(argv)


def endpoint(name: str, given: argparse.Namespace, initial_tokens: int) -> Endpoint:
    """Over a growable cache that begins with memory for so many tokens and the null block."""
    return Endpoint.create(
        name,
        device=given.device,
        specs=[kv_spec(given.block_size)],
        layouts=[KVCacheLayout.parse("--layout", given.layout)],
        capacity_blocks=[CAPACITY_TOKENS // given.block_size],
        initial_blocks=[1 + initial_tokens // given.block_size],
        connectors=given.connectors.split(","),
    )


def blocks_of_prompt(prompt: int, block_size: int) -> list[int]:
    """An engine has an allocator. Here prompt 0 has the first blocks behind the null block."""
    count = NUM_TOKENS // block_size
    return list(range(1 + prompt * count, 1 + (prompt + 1) * count))
