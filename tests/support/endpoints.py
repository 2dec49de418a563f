"""Endpoints of one process over loopback, and what a transfer between them has to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.transfer.endpoint import Endpoint

TIMEOUT_S = 5.0


def kv_spec(**changes: Any) -> KVCacheSpec:
    shape = {
        "num_layers": 2,
        "num_kv_heads": 4,
        "head_dim_k": 8,
        "head_dim_v": 8,
        "dtype": "float32",
        "block_size": 16,
    }
    return KVCacheSpec(**(shape | changes))


def growable(
    name: str,
    spec: KVCacheSpec | None = None,
    layout: str = "LBHNC",
    initial: int = 33,
    capacity: int = 1024,
    **options: Any,
) -> Endpoint:
    options = {"connectors": ("loopback",)} | options
    endpoint = Endpoint.create(
        name,
        device="cpu",
        specs=[spec or kv_spec()],
        layouts=[KVCacheLayout(layout)],
        capacity_blocks=[capacity],
        initial_blocks=[initial],
        **options,
    )
    endpoint.register()
    return endpoint


def meet(a: Endpoint, b: Endpoint) -> None:
    """Each is to the other what its name says."""
    told = a.describe(b.name), b.describe(a.name)
    b.connect(a.name, told[0])
    a.connect(b.name, told[1])


def part(a: Endpoint, b: Endpoint) -> None:
    b.acknowledge(a.name, a.disconnect(b.name))
    a.acknowledge(b.name, b.disconnect(a.name))


def fill(endpoint: Endpoint, seed: int, num_blocks: int | None = None, group: int = 0) -> None:
    """Every byte of the committed blocks, at random."""
    random = torch.Generator().manual_seed(seed)
    count = endpoint.num_blocks[group] if num_blocks is None else num_blocks
    for view in endpoint.views[group]:
        places = view[:count].view(torch.uint8)
        places.copy_(torch.randint(0, 256, places.shape, generator=random, dtype=torch.uint8))


def snapshot(endpoint: Endpoint, num_blocks: int | None = None, group: int = 0) -> torch.Tensor:
    """[L, B, H, N, bytes of C] of the committed blocks."""
    count = endpoint.num_blocks[group] if num_blocks is None else num_blocks
    return torch.stack([view[:count].view(torch.uint8).clone() for view in endpoint.views[group]])


def expected(
    src: torch.Tensor,
    dst: torch.Tensor,
    blocks: tuple[Sequence[int], Sequence[int]],
    tokens: range,
    layers: range | None = None,
    heads: tuple[range, range] | None = None,
) -> torch.Tensor:
    """`dst` after the transfer, token by token and head by head; `heads` in each side's own
    numbers, one for one."""
    found = dst.clone()
    layers = range(src.shape[0]) if layers is None else layers
    ours, theirs = heads or (range(src.shape[2]), range(dst.shape[2]))
    for token in tokens:
        b, n = divmod(token, src.shape[3])
        to_b, to_n = divmod(token, dst.shape[3])
        for layer in layers:
            for h, to_h in zip(ours, theirs, strict=True):
                found[layer, blocks[1][to_b], to_h, to_n] = src[layer, blocks[0][b], h, n]
    return found


def same(a: Endpoint, block: int, b: Endpoint, other: int, group: int = 0) -> bool:
    """Whether two blocks hold the same bytes, in all layers."""
    pairs = zip(a.views[group], b.views[group], strict=True)
    return all(
        torch.equal(x[block].view(torch.uint8), y[other].view(torch.uint8)) for x, y in pairs
    )


def memfds() -> int:
    """Open descriptors and mappings of this process that are chunks of memory."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    open_fds = sum("memfd:" in str(path.readlink()) for path in links if path.is_symlink())
    return open_fds + Path("/proc/self/maps").read_text().count("memfd:")
