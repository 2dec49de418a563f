"""How a range is cut into chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import CacheError
from kvxfer.memory.chunks import LARGEST_CHUNK, chunk_sizes, largest_for

G = 4096


@given(
    count=st.integers(0, 100_000),
    granularity=st.sampled_from([4096, 65536, 2 << 20, 128 << 20]),
    largest=st.integers(1, 256 << 20),
)
def test_chunk_sizes_are_few_whole_and_falling(count, granularity, largest):
    size = count * granularity
    sizes = chunk_sizes(size, granularity, largest)
    greatest = max((granularity << k for k in range(20) if granularity << k <= largest), default=0)
    greatest = greatest or granularity
    assert sum(sizes) == size
    assert sizes == sorted(sizes, reverse=True)
    assert all(piece % granularity == 0 and piece <= greatest for piece in sizes)
    # Binary digits of the tail: no set of such pieces is smaller.
    tail = size % greatest // granularity
    assert len(sizes) == size // greatest + tail.bit_count()


def test_chunk_sizes_of_an_example():
    mib = 1 << 20
    assert chunk_sizes(203 * mib, mib, LARGEST_CHUNK) == [64 * mib] * 3 + [8 * mib, 2 * mib, mib]


@pytest.mark.parametrize(("size", "granularity"), [(G + 1, G), (-G, G), (G, 0)])
def test_chunk_sizes_refuse_what_cannot_be_cut(size, granularity):
    with pytest.raises(CacheError):
        chunk_sizes(size, granularity)


@given(
    granules=st.integers(1, 1 << 18),
    others=st.integers(0, 1 << 20),
    granularity=st.sampled_from([4096, 2 << 20]),
)
def test_large_steps_take_larger_chunks_that_leave_parts_to_give_back(
    granules, others, granularity
):
    """A range of `granules`, in a step that commits `others` more besides."""
    size = granules * granularity
    step = size + others * granularity
    largest = largest_for(size, step)
    assert largest >= LARGEST_CHUNK
    if largest > LARGEST_CHUNK:
        assert largest * 4 <= size, "a range is given back in quarters at least"
        assert largest * 64 <= step
    assert len(chunk_sizes(size, granularity, largest)) <= len(chunk_sizes(size, granularity))


def test_small_steps_keep_the_largest_size():
    assert largest_for(LARGEST_CHUNK, 64 * LARGEST_CHUNK) == LARGEST_CHUNK
    assert largest_for(256 << 30, 256 << 30) == 4 << 30
    assert largest_for(8 * LARGEST_CHUNK, 256 << 30) == 2 * LARGEST_CHUNK
    assert largest_for(256 << 30, 256 << 30, largest=8 << 30) == 8 << 30
