"""Hand-overs between workers of any sizes, every element moved by itself and compared."""

import dataclasses

import numpy as np
import pytest

from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.spec import GroupKind, KVCacheSpec
from kvxfer.errors import PlanError
from kvxfer.transfer import rank_plans
from kvxfer.transfer.plan_parts import MoveParts
from kvxfer.transfer.rank_plans import RankPlans, WorkerSide
from kvxfer.transfer.regions import Region, RegionSet

HEADS = 4
FULL = KVCacheSpec(2, HEADS, 2, 2, "float32", 4)
LATENT = KVCacheSpec(1, 1, 6, 0, "float32", 4, GroupKind.MLA)
NUM_PROMPT = 11
TOKENS = [range(4, 11)] * 2
LAYERS = [range(1, 2), range(1)]


def side(size, layout, blocks, block_size=4):
    """A worker whose ranks hold the two groups' shares."""
    share = dataclasses.replace(
        FULL,
        num_kv_heads=max(1, HEADS // size),
        block_size=block_size,
        replicas=max(1, size // HEADS),
    )
    specs = [share, dataclasses.replace(LATENT, block_size=block_size)]
    geometry = CacheGeometry.build(specs, [KVCacheLayout(layout)] * 2, [8, 8], 4096)
    regions = RegionSet((Region(0, geometry.total_bytes),), 1)
    return WorkerSide(geometry, size, regions, [blocks, blocks])


def element(geometry, group, layer, block, head, slot, content):
    """Where a number of 4 bytes lies in a rank's cache."""
    one = geometry.groups[group]
    return (one.offset + int(np.dot(one.strides, [layer, block, head, slot, 0]))) // 4 + content


def elements(worker, rank, tokens, layers):
    """(group, layer, model's head, token, content) to its place in `rank`'s cache."""
    found = {}
    for group, spec in enumerate(worker.geometry.specs):
        first = 0 if spec.kind is GroupKind.MLA else rank * HEADS // worker.size
        for layer in layers[group]:
            for token in tokens[group]:
                block = worker.blocks[group][token // spec.block_size]
                for head in range(spec.num_kv_heads):
                    for content in range(spec.content_dim):
                        slot = token % spec.block_size
                        place = element(worker.geometry, group, layer, block, head, slot, content)
                        found[group, layer, first + head, token, content] = place
    return found


@pytest.mark.parametrize("src_size", [1, 2, 4, 8])
@pytest.mark.parametrize("dst_size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("layouts", "sizes"), [(("LBHNC", "BLHNC"), (4, 4)), (("BHLNC", "LBNHC"), (4, 2))]
)
def test_every_rank_gets_every_element_of_its_heads_and_nothing_else(
    src_size, dst_size, layouts, sizes
):
    source = side(src_size, layouts[0], [3, 1, 5], sizes[0])
    target = side(dst_size, layouts[1], [6, 2, 7, 4, 1, 5][: -(-NUM_PROMPT // sizes[1])], sizes[1])
    names = {}  # of every element anywhere in the model: a number of its own
    caches = [np.zeros(source.geometry.total_bytes // 4, np.int32) for _ in range(src_size)]
    for rank, cache in enumerate(caches):
        whole = [range(NUM_PROMPT)] * 2, [range(2), range(1)]
        for name, place in elements(source, rank, *whole).items():
            cache[place] = names.setdefault(name, len(names) + 1)
    arrived = [np.zeros(target.geometry.total_bytes // 4, np.int32) for _ in range(dst_size)]
    for move in RankPlans(source, target, NUM_PROMPT, TOKENS).moves(LAYERS):
        again = MoveParts.of(move).move()  # as another rank's process gets it
        assert (again.src_rank, again.dst_rank) == (move.src_rank, move.dst_rank)
        runs = again.plan.runs
        for src, dst, size in zip(runs.src_offsets, runs.dst_offsets, runs.sizes, strict=True):
            part = caches[move.src_rank][src // 4 : (src + size) // 4]
            assert not arrived[move.dst_rank][dst // 4 : (dst + size) // 4].any(), "once"
            arrived[move.dst_rank][dst // 4 : (dst + size) // 4] = part
    for rank, cache in enumerate(arrived):
        expected = np.zeros_like(cache)
        for name, place in elements(target, rank, TOKENS, LAYERS).items():
            expected[place] = names[name]
        assert (cache == expected).all()


def test_one_move_where_nothing_travels():
    """So that whoever waits for a piece is told."""
    nothing = [range(0)] * 2
    plans = RankPlans(side(2, "LBHNC", [3, 1, 5]), side(2, "LBHNC", [3, 1, 5]), 11, nothing)
    moves = plans.moves(LAYERS)
    assert [move.plan.total_bytes for move in moves] == [0]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_head_that_nobody_sends_is_noticed(monkeypatch, lost):
    whole = rank_plans.sources_of

    def forgetful(*asked):
        return whole(*asked)[lost + 1 :] or whole(*asked)[:lost]

    monkeypatch.setattr(rank_plans, "sources_of", forgetful)
    monkeypatch.setattr(rank_plans, "_expected", rank_plans._expected.__wrapped__)
    source, target = side(2, "LBHNC", [3, 1, 5]), side(1, "LBHNC", [3, 1, 5])
    with pytest.raises(PlanError, match=r"rank 0 would get \d+ bytes of \d+"):
        RankPlans(source, target, NUM_PROMPT, TOKENS).moves(LAYERS)


def test_replicas_that_no_worker_of_the_size_has_are_refused():
    odd = dataclasses.replace(side(8, "LBHNC", [3, 1, 5]), size=3)
    with pytest.raises(PlanError, match="replicas: 2 of each head"):
        RankPlans(odd, side(1, "LBHNC", [3, 1, 5]), 11, TOKENS)


def test_heads_that_are_not_the_sources_are_refused():
    target = side(2, "LBHNC", [3, 1, 5])
    with pytest.raises(PlanError):
        RankPlans(side(1, "LBHNC", [3, 1, 5]), dataclasses.replace(target, size=4), 11, TOKENS)
