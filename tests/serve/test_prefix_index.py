"""Who has which beginnings of prompts: bounded, the newest first."""

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.cache.prefix_cache import block_hashes
from kvxfer.serve.prefix_index import MAX_HOLDERS, PrefixIndex

PROMPTS = st.lists(st.integers(0, 1), max_size=10)
INSERTS = st.lists(st.tuples(PROMPTS, st.sampled_from("abc")), max_size=12)


@given(INSERTS, PROMPTS)
def test_each_worker_has_the_longest_beginning_that_it_shares(inserts, asked):
    index = PrefixIndex()
    for prompt, worker in inserts:
        index.insert(block_hashes(prompt, 2), worker)
    expected = {}
    for prompt, worker in inserts:
        pairs = zip(block_hashes(prompt, 2), block_hashes(asked, 2), strict=False)
        shared = 0
        for one, other in pairs:
            if one != other:
                break
            shared += 1
        expected[worker] = max(shared, expected.get(worker, 0))
    assert index.lookup(block_hashes(asked, 2)) == {w: n for w, n in expected.items() if n}


def test_what_was_used_longest_ago_is_forgotten():
    index = PrefixIndex(max_blocks=4)
    old, kept, new = ([byte, byte, byte, byte] for byte in (1, 2, 3))
    for prompt in (old, kept, old, new):
        index.insert(block_hashes(prompt, 2), "a")
    assert len(index) == 4
    assert index.lookup(block_hashes(kept, 2)) == {}
    assert index.lookup(block_hashes(old, 2)) == {"a": 2}
    assert index.lookup(block_hashes(new, 2)) == {"a": 2}


def test_a_prompt_that_is_longer_than_all_loses_its_end():
    index = PrefixIndex(max_blocks=3)
    keys = block_hashes(list(range(20)), 2)
    index.insert(keys, "a")
    assert index.lookup(keys) == {"a": 3}


def test_of_a_block_the_newest_holders_are_remembered():
    index = PrefixIndex()
    keys = block_hashes([1, 2], 2)
    for number in range(MAX_HOLDERS + 3):
        index.insert(keys, f"w{number}")
    index.insert(keys, "w4")
    assert set(index.lookup(keys)) == {f"w{n}" for n in range(3, MAX_HOLDERS + 3)}
