"""The choice between the direct and the staged way, for the cases that it was made for."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import UsageError
from kvxfer.transfer.cost import choose_way

PROMPT = 512 << 20
"""4,096 tokens of the shape that all figures are about."""
HOST = {"direct_gbps": 3.5, "staged_gbps": 1.7, "per_run_s": 6e-6, "fixed_s": 2e-3}
PULLED = {"direct_gbps": 275.0, "staged_gbps": 300.0, "per_run_s": 0.15e-6, "fixed_s": 1e-3}
PUSHED = {**PULLED, "direct_gbps": 0.5}


@pytest.mark.parametrize(
    ("num_runs", "total_bytes", "path", "wanted"),
    [
        (256, PROMPT, HOST, "direct"),
        (8_192, PROMPT, HOST, "direct"),
        (262_144, PROMPT, HOST, "staged"),
        (32, 64 << 10, HOST, "direct"),
        (8_192, PROMPT, PULLED, "staged"),
        (256, PROMPT, PULLED, "direct"),
        (262_144, PROMPT, PULLED, "staged"),
        (256, PROMPT, PUSHED, "staged"),
        (1, 2048, PUSHED, "direct"),
        (0, 0, PUSHED, "direct"),
    ],
)
def test_the_cases_it_was_made_for(
    num_runs: int, total_bytes: int, path: dict[str, Any], wanted: str
) -> None:
    assert choose_way(num_runs, total_bytes, **path) == wanted


@given(
    num_runs=st.integers(0, 10**6),
    total_bytes=st.integers(1, 1 << 40),
    rates=st.tuples(st.floats(0.01, 1000), st.floats(0.01, 1000)),
    per_run_s=st.floats(0, 1e-5),
    fixed_s=st.floats(0, 1e-2),
)
def test_more_runs_never_speak_for_the_direct_way(
    num_runs: int, total_bytes: int, rates: tuple[float, float], per_run_s: float, fixed_s: float
) -> None:
    rest = total_bytes, *rates, per_run_s, fixed_s
    if choose_way(num_runs, *rest) == "staged":
        assert choose_way(2 * num_runs + 1, *rest) == "staged"
    else:
        assert choose_way(num_runs, *rest[:-1], 2 * fixed_s) == "direct"


def test_a_way_that_is_not_there_is_not_taken() -> None:
    assert choose_way(10, 1, 0.0, 0.1, 0.0, 9.0) == "staged"
    assert choose_way(10**6, 1, 0.1, 0.0, 1.0, 0.0) == "direct"
    with pytest.raises(UsageError, match="neither"):
        choose_way(1, 1, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("bad", [-1, math.nan])
def test_nonsense_is_named(index: int, bad: float) -> None:
    names = ("num_runs", "total_bytes", "direct_gbps", "staged_gbps", "per_run_s", "fixed_s")
    values: list[Any] = [1, 1, 1.0, 1.0, 0.0, 0.0]
    values[index] = bad
    with pytest.raises(UsageError, match=names[index]):
        choose_way(*values)
