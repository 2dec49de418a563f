"""Heads of tensor-parallel ranks, against what the definitions say head by head."""

from collections import Counter

import pytest

from kvxfer.errors import PlanError
from kvxfer.transfer.shards import destinations_of, head_range, sources_of

SIZES = [1, 2, 3, 4, 6, 8]
HEADS = [1, 2, 4, 6, 12]


def divides(size, heads):
    return size % heads == 0 or heads % size == 0


CASES = [
    (src, dst, heads)
    for src in SIZES
    for dst in SIZES
    for heads in HEADS
    if divides(src, heads) and divides(dst, heads)
]
"""(source size, destination size, KV heads)"""

every_case = pytest.mark.parametrize(("src_size", "dst_size", "heads"), CASES)


@pytest.mark.parametrize("heads", HEADS)
def test_every_head_has_equally_many_holders_and_every_rank_as_many_heads(heads):
    for size in filter(lambda size: divides(size, heads), SIZES):
        held = [head_range(rank, size, heads) for rank in range(size)]
        assert {len(one) for one in held} == {max(1, heads // size)}
        holders = Counter(head for one in held for head in one)
        assert set(holders) == set(range(heads))
        assert set(holders.values()) == {max(1, size // heads)}
        assert held == sorted(held, key=lambda one: one.start), "neighbours hold neighbours"


def test_the_usual_cases():
    assert [list(head_range(rank, 2, 4)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [list(head_range(rank, 8, 4)) for rank in range(8)] == [
        [0], [0], [1], [1], [2], [2], [3], [3],
    ]  # fmt: skip
    assert all(head_range(rank, 8, 1) == range(1) for rank in range(8)), "MLA: replicated on all"


@every_case
def test_every_head_of_a_destination_has_one_source_that_holds_it(src_size, dst_size, heads):
    for rank in range(dst_size):
        found = sources_of(rank, dst_size, src_size, heads)
        got = [head for _, part in found for head in part]
        assert got == list(head_range(rank, dst_size, heads)), "each once, in order"
        names = [source for source, _ in found]
        assert names == sorted(set(names)), "one part a source"
        for source, part in found:
            assert part.step == 1
            assert set(part) <= set(head_range(source, src_size, heads))


@every_case
def test_the_holders_of_a_head_share_its_readers_evenly(src_size, dst_size, heads):
    served = Counter(
        (head, source)
        for rank in range(dst_size)
        for source, part in sources_of(rank, dst_size, src_size, heads)
        for head in part
    )
    for head in range(heads):
        loads = [
            served[head, source]
            for source in range(src_size)
            if head in head_range(source, src_size, heads)
        ]
        assert max(loads) - min(loads) <= 1


@every_case
def test_both_ends_say_the_same(src_size, dst_size, heads):
    expected = {
        (source, rank, part)
        for rank in range(dst_size)
        for source, part in sources_of(rank, dst_size, src_size, heads)
    }
    told = [
        (source, rank, part)
        for source in range(src_size)
        for rank, part in destinations_of(source, src_size, dst_size, heads)
    ]
    assert len(told) == len(expected)
    assert set(told) == expected


@pytest.mark.parametrize(("size", "heads"), [(1, 8), (4, 8), (8, 4), (8, 1)])
def test_equal_sizes_pair_each_rank_with_its_own(size, heads):
    for rank in range(size):
        assert sources_of(rank, size, size, heads) == [(rank, head_range(rank, size, heads))]


def test_replicas_that_nobody_needs_have_nothing_to_do():
    assert [len(destinations_of(rank, 8, 4, 4)) for rank in range(8)] == [1, 0] * 4
    assert sources_of(0, 1, 8, 4) == [(0, range(1)), (2, range(1, 2)), (4, range(2, 3)),
                                      (6, range(3, 4))]  # fmt: skip


@pytest.mark.parametrize(("size", "heads"), [(3, 4), (3, 8), (6, 4), (8, 12)])
def test_sizes_that_do_not_divide_are_named(size, heads):
    for ask in (
        lambda: head_range(0, size, heads),
        lambda: sources_of(0, size, 1, heads),
        lambda: sources_of(0, 1, size, heads),
        lambda: destinations_of(0, size, 1, heads),
        lambda: destinations_of(0, 1, size, heads),
    ):
        with pytest.raises(
            PlanError, match=f"tensor_parallel_size {size} and num_kv_heads {heads}"
        ):
            ask()


@pytest.mark.parametrize(
    ("rank", "size", "heads", "field"),
    [
        (0, 0, 4, "tensor_parallel_size"),
        (0, -2, 4, "tensor_parallel_size"),
        (0, 2, 0, "num_kv_heads"),
        (2, 2, 4, "rank"),
        (-1, 2, 4, "rank"),
    ],
)
def test_other_numbers_that_cannot_be_are_named(rank, size, heads, field):
    with pytest.raises(PlanError, match=f"^{field}"):
        head_range(rank, size, heads)
