"""The bytes that lanes are tried out with: what is misplaced, or changed, shows."""

import pytest
import torch

from kvxfer.transfer.pattern import PatternHeads, check_pattern, erase, write_pattern

LAYERS, BLOCKS, HEADS, SLOTS = 2, 6, 3, 4


def views(content=16, order=(0, 1, 2, 3), dtype=torch.bfloat16):
    """[B, H, N, C], its axes in `order` in memory."""
    shape = [(BLOCKS, HEADS, SLOTS, content)[axis] for axis in order]
    back = [order.index(axis) for axis in range(4)]
    return [torch.zeros(shape, dtype=dtype).permute(back) for _ in range(LAYERS)]


@pytest.mark.parametrize("content", [16, 5])
def test_two_layouts_hold_the_same_pattern(content):
    ours, theirs = views(content), views(content, (1, 0, 2, 3))
    write_pattern(ours, [4, 1], 7)
    for source, target in zip(ours, theirs, strict=True):
        target[[2, 5]] = source[[4, 1]]
    assert check_pattern(theirs, [2, 5], 7)
    assert not check_pattern(theirs, [5, 2], 7)
    assert not check_pattern(theirs, [2, 5], 8)


def test_block_sizes_may_differ():
    small, large = views(), [torch.zeros(3, HEADS, 2 * SLOTS, 16, dtype=torch.bfloat16)] * 1
    write_pattern(small, [3, 0], 1)
    large[0][2] = torch.cat([small[0][3], small[0][0]], dim=1)
    assert check_pattern(large, [2], 1)


@pytest.mark.parametrize("content", [16, 5])
def test_shards_of_the_heads_hold_their_part_of_the_whole(content):
    whole = views(content)
    write_pattern(whole, [4, 1], 7)
    for first, heads in ((0, 1), (1, 2), (2, 1)):
        held = PatternHeads(first, HEADS)
        shard = [torch.zeros(BLOCKS, heads, SLOTS, content, dtype=torch.bfloat16) for _ in whole]
        write_pattern(shard, [0, 3], 7, held)
        for part, view in zip(shard, whole, strict=True):
            mine, theirs = part[[0, 3]], view[[4, 1], first : first + heads]
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        assert check_pattern(shard, [0, 3], 7, held)
        assert not check_pattern(shard, [0, 3], 7, PatternHeads((first + 1) % 2, HEADS))


@pytest.mark.parametrize("where", [(0, 4, 0, 0, 0), (1, 1, 2, 3, 15)])
def test_one_changed_element_shows(where):
    made = views()
    write_pattern(made, [4, 1], 3)
    layer, *place = where
    made[layer].view(torch.uint8)[tuple(place)] ^= 1
    assert not check_pattern(made, [4, 1], 3)


def test_no_two_places_hold_the_same_and_others_stay_as_they_are():
    made = views(content=4)
    write_pattern(made, [1, 2], 0)
    words = torch.cat([view[[1, 2]].reshape(-1, 4).view(torch.int64) for view in made])
    assert len(words.unique()) == words.numel()
    assert all(int(view[[0, 3, 4, 5]].count_nonzero()) == 0 for view in made)
    erase(made, [1, 2])
    assert all(int(view.count_nonzero()) == 0 for view in made)
