"""Somebody else's metrics, read."""

from __future__ import annotations

import pytest

from kvxfer.telemetry.reading import totals


def test_series_are_summed_by_name_and_buckets_left_out() -> None:
    text = (
        "# TYPE a counter\na_total{x=\"1\"} 2\na_total{x=\"2\"} 3\n"
        "# TYPE h histogram\nh_bucket{le=\"+Inf\"} 4\nh_count 4\nh_sum 0.5\nloose 7\n"
    )  # fmt: skip
    assert totals(text) == {"a_total": 5, "h_count": 4, "h_sum": 0.5, "loose": 7}


@pytest.mark.parametrize("text", ["a b c d\n", "<html>\n", 'a{x="1} 2\n'])
def test_what_is_no_exposition_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        totals(text)
