"""Tensors that an engine brings: which are taken, what is registered of them, what is refused."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
import torch
from support.endpoints import (
    TIMEOUT_S,
    expected,
    fill,
    growable,
    kv_spec,
    meet,
    memfds,
    part,
    snapshot,
)

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.errors import CacheError, DeadlineExceeded, PlanError, RegionError, UsageError
from kvxfer.transfer.endpoint import Endpoint, ExistingCache, Ticket

NUM_BLOCKS = 20
SIZES = {"L": 2, "B": NUM_BLOCKS, "H": 4, "N": 16, "C": 16}
PER_LAYER = [
    (KVCacheLayout.LBHNC, 64),
    (KVCacheLayout.LBHNC, 1 << 17),
    (KVCacheLayout.LBNHC, 4096),
    (KVCacheLayout.LHBNC, 64),
]
"""And how many bytes each layer is rounded up to."""


def shape(axes: str) -> list[int]:
    return [SIZES[axis] for axis in axes]


def one_tensor(layout: KVCacheLayout) -> torch.Tensor:
    return torch.zeros(shape(layout.value))


def padded_layers(layout: KVCacheLayout, padding: int) -> list[torch.Tensor]:
    """One tensor a layer, each rounded up to a power of two as an allocator would."""
    each = torch.zeros(shape(layout.value.replace("L", ""))).numel()
    step = -(-each * 4 // padding) * padding // 4
    pool = torch.zeros(step * SIZES["L"])
    inner = shape(layout.value.replace("L", ""))
    return [pool[layer * step :][:each].view(inner) for layer in range(SIZES["L"])]


def existing(name: str, cache: ExistingCache, connector: str = "loopback") -> Endpoint:
    endpoint = Endpoint(name, cache, [connector])
    endpoint.register()
    return endpoint


def finish(ticket: Ticket, other: Endpoint) -> None:
    """Within one process NIXL needs both ends polled."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not ticket.done and time.monotonic() < deadline_s:
        other.poll()
        with suppress(DeadlineExceeded):
            ticket.wait(0)
    ticket.wait(0)


def check_both_ways(cache: ExistingCache, connector: str = "loopback") -> None:
    """Push into it and pull out of it, from a growable cache of another layout and block size."""
    with (
        existing("e", cache, connector) as e,
        growable("g", kv_spec(block_size=8), "BHLNC", 64, connectors=[connector]) as g,
    ):
        meet(e, g)
        fill(g, 1)
        fill(e, 2)
        blocks = [9, 3, 4, 8, 7, 1], [5, 19, 2]
        source, before = snapshot(g), snapshot(e)
        finish(g.push("e", *blocks, range(3, 45)), e)
        wanted = expected(source, before, blocks, range(3, 45))
        assert torch.equal(snapshot(e), wanted)
        finish(g.pull("e", [1, 4], [10, 11, 12, 13]), e)
        after = expected(wanted, source, ([1, 4], [10, 11, 12, 13]), range(32))
        assert torch.equal(snapshot(g), after)
        e.check_conservation()
        part(e, g)


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_one_tensor_for_all_layers_in_any_layout(layout):
    tensor = one_tensor(layout)
    cache = ExistingCache(tensor, kv_spec(), layout)
    assert [(r.offset, r.size) for r in cache.regions] == [(0, tensor.nbytes)]
    view = cache.views[0][1]
    assert view.shape == (NUM_BLOCKS, 4, 16, 16)
    view[3, 2, 5] = 7
    place = dict(zip("LBHN", (1, 3, 2, 5), strict=True))
    assert tensor[tuple(place.get(axis, slice(None)) for axis in layout.value)].eq(7).all()
    check_both_ways(cache)
    assert tensor.data_ptr() == cache.window.base_address


@pytest.mark.parametrize(("layout", "padding"), PER_LAYER)
def test_a_tensor_for_each_layer_at_equal_steps(layout, padding):
    layers = padded_layers(layout, padding)
    cache = ExistingCache(layers, kv_spec(), layout)
    base = layers[0].data_ptr()
    assert [(r.offset, r.size) for r in cache.regions] == [
        (layer.data_ptr() - base, layer.nbytes) for layer in layers
    ]
    check_both_ways(cache)


def test_nixl_reaches_them():
    layers = padded_layers(KVCacheLayout.LBNHC, 4096)
    check_both_ways(ExistingCache(layers, kv_spec(), KVCacheLayout.LBNHC), "nixl")


def test_k_and_v_apart_are_layers_of_their_own():
    """[2, B, N, H, D] a layer: twice the layers, with no V."""
    pool = torch.zeros(2, 2, NUM_BLOCKS, 16, 4, 8)
    spec = kv_spec(num_layers=4, head_dim_v=0)
    halves = [half for layer in pool for half in layer]
    cache = ExistingCache(halves, spec, KVCacheLayout.LBNHC)
    with existing("e", cache) as e, growable("g", spec) as g:
        meet(e, g)
        fill(g, 1)
        g.push("e", [1, 2], [4, 3]).wait(TIMEOUT_S)
        for layer in range(2):
            for half in range(2):
                got = pool[layer, half, [4, 3]].transpose(1, 2).view(torch.uint8)
                sent = g.views[0][2 * layer + half][1:3].view(torch.uint8)
                assert torch.equal(got, sent)
        part(e, g)


def test_a_permuted_view_will_do():
    tensor = torch.zeros(shape("BLNHC")).permute(0, 1, 3, 2, 4)
    with pytest.raises(UsageError, match="strides"):
        ExistingCache(tensor, kv_spec(), KVCacheLayout.BLHNC)
    check_both_ways(ExistingCache(tensor.permute(0, 1, 3, 2, 4), kv_spec(), KVCacheLayout.BLNHC))


def test_one_layer_is_one_tensor_or_a_list_of_one():
    spec = kv_spec(num_layers=1)
    tensor = torch.zeros(1, *shape("BHNC"))
    for tensors in (tensor, [tensor[0]]):
        cache = ExistingCache(tensors, spec, KVCacheLayout.LBHNC)
        assert [(r.offset, r.size) for r in cache.regions] == [(0, tensor.nbytes)]


def test_block_0_is_used_where_there_is_no_null_block():
    tensor = one_tensor(KVCacheLayout.LBHNC)
    cache = ExistingCache(tensor, kv_spec(), KVCacheLayout.LBHNC, has_null_block=False)
    with existing("e", cache) as e, growable("g") as g:
        meet(e, g)
        fill(g, 1)
        g.push("e", [1], [0]).wait(TIMEOUT_S)
        assert torch.equal(e.views[0][1][0].view(torch.uint8), g.views[0][1][1].view(torch.uint8))
        with pytest.raises(PlanError, match="g: block 0 is the null block"):
            g.push("e", [0], [0])
        part(e, g)


def test_bytes_between_the_tensors_are_not_reachable():
    layers = padded_layers(KVCacheLayout.LBHNC, 1 << 17)
    cache = ExistingCache(layers, kv_spec(), KVCacheLayout.LBHNC)
    assert cache.geometry.total_bytes > sum(layer.nbytes for layer in layers)
    with existing("e", cache) as e, growable("g") as g:
        meet(e, g)
        with pytest.raises(PlanError, match=f"1 to {NUM_BLOCKS - 1}"):
            g.push("e", [1], [NUM_BLOCKS])
        regions = e._memory.regions
        with pytest.raises(RegionError):
            end = torch.tensor([layers[0].nbytes]).numpy()
            regions.check_covers(end, end * 0 + 1, "test")
        part(e, g)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: one_tensor(KVCacheLayout.LBNHC), r"is not \[L=2, B=20, H=4, N=16, C=16\]"),
        (lambda: one_tensor(KVCacheLayout.LBHNC)[0], r"is not \[L=2"),
        (lambda: [*padded_layers(KVCacheLayout.LBHNC, 64)] * 2, "the spec has 2 layers"),
        (list, "the spec has 2 layers"),
        (lambda: one_tensor(KVCacheLayout.LBHNC).half(), "dtype: 'torch.float16'"),
        (lambda: one_tensor(KVCacheLayout.LBHNC).to("meta"), "device: 'meta'"),
        (lambda: padded_layers(KVCacheLayout.LBHNC, 64)[::-1], "ascending addresses"),
        (lambda: torch.zeros(2, 21, 4, 16, 17)[:, :20, :, :, :16], "strides"),
        (lambda: [torch.zeros(20, 4, 16, 16), torch.zeros(20, 4, 16, 16)[:19]], "is not"),
    ],
)
def test_tensors_that_are_not_as_described_are_refused_in_a_line(make, text):
    with pytest.raises(UsageError, match=text) as raised:
        ExistingCache(make(), kv_spec(), KVCacheLayout.LBHNC)
    assert "\n" not in str(raised.value)


def test_layers_at_unequal_steps_are_refused():
    pool = torch.zeros(1 << 18)
    size = torch.zeros(shape("BHNC")).numel()
    layers = [pool[start:][:size].view(shape("BHNC")) for start in (0, size, 3 * size)]
    with pytest.raises(UsageError, match="equal steps: make them of one allocation"):
        ExistingCache(layers, kv_spec(num_layers=3), KVCacheLayout.LBHNC)


def test_a_gap_that_no_padding_explains_is_refused():
    pool = torch.zeros(1 << 18)
    size = torch.zeros(shape("BHNC")).numel()
    layers = [pool[start:][:size].view(shape("BHNC")) for start in (0, size + 4)]
    with pytest.raises(UsageError, match="padded to a power of two"):
        ExistingCache(layers, kv_spec(), KVCacheLayout.LBHNC)


def test_what_only_our_own_memory_can_do_is_refused():
    before = memfds()
    cache = ExistingCache(one_tensor(KVCacheLayout.LBHNC), kv_spec(), KVCacheLayout.LBHNC)
    with pytest.raises(UsageError, match="peer maps growable memory"):
        Endpoint("e", cache, ["peer", "nixl"])
    with existing("e", cache) as e:
        assert e.num_blocks == (NUM_BLOCKS,)
        for call in (lambda: e.grow(30), lambda: e.revoke(10)):
            with pytest.raises(CacheError, match="brought by the engine"):
                call()
        with pytest.raises(CacheError, match="nothing was revoked"):
            e.release()
        e.check_conservation()
    assert memfds() == before
