"""The account after warm-up: its constants, its guard, and that a reader can add it up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.cache.sizing import (
    WarmUp,
    account_after_warm_up,
    account_as_given,
    account_by_estimate,
    growth_buffer,
    resolve_policy,
)
from kvxfer.errors import UsageError

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
@given(sizes, st.tuples(sizes, sizes, sizes), sizes, sizes, sizes)
def test_the_account_adds_up(available, taken, peak, proved, pinned):
    warm_up = WarmUp(*taken, peak)
    account = account_after_warm_up(available, warm_up, proved, pinned)
    assert account.buffer == growth_buffer(available, peak)
    assert account.kv >= proved >= 0
    left = available - sum(taken) - pinned - account.buffer
    assert account.kv == max(left, proved)
    assert bool(account.note) == (left < proved)


def test_when_nothing_is_left_the_proved_size_is_kept_and_told():
    account = account_after_warm_up(8 * GIB, WarmUp(9 * GIB, 0, 0, 0), 64 * MIB)
    assert account.kv == 64 * MIB
    assert "warm-up size is kept" in account.lines()[-1]


def test_the_lines_are_the_sum_that_a_reader_adds_up():
    warm_up = WarmUp(weights=3 * GIB, transfer=200 * MIB, graphs=500 * MIB, peak=GIB)
    account = account_after_warm_up(10 * GIB, warm_up, MIB, pinned_by_peers=64 * MIB)
    lines = account.lines()
    numbers = [float(line[28:].removesuffix("MiB")) for line in lines]
    assert [line[:11].strip() for line in lines] == [
        "available", "- weights", "- transfer", "- graphs, w", "- pinned by", "- buffer (p",
        "= KV cache",
    ]  # fmt: skip
    assert numbers[0] - sum(numbers[1:-1]) == pytest.approx(numbers[-1], abs=0.5)


def test_a_size_that_was_given_is_taken_at_its_word():
    account = account_as_given(GIB, WarmUp(2 * GIB, 0, 0, GIB), 5 * GIB)
    assert (account.kv, account.buffer) == (5 * GIB, 0)
    assert "kv_cache_memory_bytes" in account.note


@BUDGET
@given(sizes, sizes, sizes)
def test_the_estimate_keeps_the_whole_peak_free(available, used, peak):
    account = account_by_estimate(available, WarmUp(used, 0, 0, peak))
    assert account.kv == max(0, available - used - peak)


@pytest.mark.parametrize(
    "enable, utilization, cannot, extensible, expected",
    [
        (None, None, "", True, 1.0),
        (None, None, "no driver", False, 0.92),
        (None, 0.5, "", True, 0.5),
        (None, 0.5, "no driver", False, 0.5),
        (True, None, "", True, 1.0),
        (False, None, "", False, 0.92),
        (False, 1.0, "", False, 1.0),
    ],
)
def test_defaults_move_together(enable, utilization, cannot, extensible, expected):
    policy = resolve_policy(enable, utilization, False, cannot)
    assert (policy.extensible, policy.utilization) == (extensible, expected)
    assert policy.utilization_given == (utilization is not None)
    assert policy.reason
    if cannot:
        assert cannot in policy.reason


@pytest.mark.parametrize(
    "enable, utilization, elastic, cannot, field",
    [
        (True, None, False, "the driver is too old", "enable_extensible_kv_cache"),
        (False, None, True, "", "kv_commit"),
        (None, None, True, "the driver is too old", "kv_commit"),
        (None, 0.0, False, "", "gpu_memory_utilization"),
        (None, 1.01, False, "", "gpu_memory_utilization"),
        (None, float("nan"), False, "", "gpu_memory_utilization"),
    ],
)
def test_conflicts_are_refused_with_the_reason(enable, utilization, elastic, cannot, field):
    with pytest.raises(UsageError) as refused:
        resolve_policy(enable, utilization, elastic, cannot)
    assert refused.value.field == field
    assert cannot in str(refused.value)
