"""A lost peer of growable GPU memory: what it may still reach stays mapped, pinned, until it is
known to be dead. On one GPU, and between two of which each process sees its own alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from support.peer_processes import MakePeer, PeerProcess, peers_in
from support.stale_steps import check_stale_peer, making

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

WAYS = {"nixl": ("push", "pull"), "peer": ("pull",)}


@pytest.fixture
def make_peer(tmp_path: Path) -> Iterator[MakePeer]:
    directory = tmp_path / "peers"
    directory.mkdir(0o700)
    with peers_in(directory) as make:
        yield make


def on_gpus(make_peer: MakePeer, connector: str, stale_gpu: int, seed: int) -> PeerProcess:
    """Seed 2 is the stale one's."""
    alone = {"CUDA_VISIBLE_DEVICES": str(stale_gpu if seed == 2 else 0)}
    return making(make_peer, seed, device="cuda:0", connector=connector, environment=alone)


@pytest.mark.parametrize("connector", WAYS)
def test_a_stale_peer_on_the_same_gpu(connector: str, make_peer: MakePeer) -> None:
    make = partial(on_gpus, make_peer, connector, 0)
    print(connector, check_stale_peer(make, WAYS[connector], has_tombstones=False))


@pytest.mark.parametrize("connector", WAYS)
def test_a_stale_peer_on_another_gpu(connector: str, make_peer: MakePeer) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    make = partial(on_gpus, make_peer, connector, 1)
    print(connector, check_stale_peer(make, WAYS[connector], has_tombstones=False))
