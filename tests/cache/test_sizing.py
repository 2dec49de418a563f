"""The account after warm-up: its constants, its guard, and that a reader can add it up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cache.sizing import account_after_warm_up, growth_buffer

MIB = 1 << 20
GIB = 1 << 30
BUDGET = settings(max_examples=200, deadline=None, derandomize=True)
sizes = st.integers(0, 1 << 40)


@pytest.mark.parametrize(
    "available, peak, buffer",
    [
        (4 * GIB, 0, 150 * MIB),  # the floor
        (4 * GIB, 700 * MIB, 150 * MIB),  # 20 % of the peak is less
        (4 * GIB, 1000 * MIB, 200 * MIB),  # 20 % of the peak
        (100 * GIB, 0, 2 * GIB),  # 2 % of available
        (100 * GIB, 20 * GIB, 4 * GIB),  # 20 % of the peak is more
        (100 * GIB, 90 * GIB, 10 * GIB),  # at most 10 % of available
        (1000 * MIB, 0, 100 * MIB),  # at most 10 %, below the floor
        (0, 0, 0),
    ],
)
def test_the_margin(available, peak, buffer):
    assert growth_buffer(available, peak) == pytest.approx(buffer, abs=MIB)


@BUDGET
@given(sizes, sizes)
def test_the_margin_is_a_tenth_at_most_and_grows_with_the_peak(available, peak):
    buffer = growth_buffer(available, peak)
    assert 0 <= buffer <= available // 10
    assert growth_buffer(available, peak + GIB) >= buffer


@BUDGET
@given(sizes, sizes, sizes, sizes)
def test_the_account_adds_up(available, used, peak, proved):
    account = account_after_warm_up(available, used, peak, proved)
    assert (account.available, account.used) == (available, used)
    assert account.buffer == growth_buffer(available, peak)
    assert account.kv >= proved >= 0
    left = available - used - account.buffer
    if account.guarded:
        assert account.kv == proved
        assert left < proved
    else:
        assert account.kv == left


def test_when_nothing_is_left_the_proved_size_is_kept_and_told():
    account = account_after_warm_up(8 * GIB, 9 * GIB, 0, 64 * MIB)
    assert (account.kv, account.guarded) == (64 * MIB, True)
    assert "warm-up size is kept" in account.lines()[-1]


def test_the_lines_are_the_sum_that_a_reader_adds_up():
    account = account_after_warm_up(10 * GIB, 3 * GIB, 0, MIB)
    lines = account.lines()
    assert [line[:12].strip() for line in lines] == [
        "available",
        "- used",
        "- buffer",
        "= KV cache",
    ]
    numbers = [float(line[12:].removesuffix("MiB")) for line in lines]
    assert numbers[0] - numbers[1] - numbers[2] == pytest.approx(numbers[3], abs=0.11)
