"""What transfers cost by each lane: the fit, and the choice for a plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.transfer.boxes import Box
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.lane_costs import LaneCost, LaneSamples, Sample, cheapest, fit
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.plan import TransferPlan

PEER, NIXL, STAGED = (Lane(name, Direction.PULL) for name in ("peer", "nixl", "staged"))
PUSHED = Lane("nixl", Direction.PUSH)
LANES = (PEER, NIXL, STAGED)
MIB = 1 << 20

samples = st.builds(
    Sample, st.integers(0, 1 << 32), st.integers(0, 1 << 20), st.floats(1e-9, 10, allow_nan=False)
)


def plan_of(num_runs: int, run_bytes: int) -> TransferPlan:
    starts = np.arange(num_runs, dtype=np.int64) * 2 * run_bytes
    return TransferPlan((Box(starts, starts, (), (), (), run_bytes),))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(LANES), st.lists(samples, max_size=6)))
def test_the_largest_transfer_costs_what_it_took(found: dict[Lane, list[Sample]]) -> None:
    costs = fit(found)
    assert set(costs) == {
        lane for lane, some in found.items() if any(one.num_bytes for one in some)
    }
    for lane, cost in costs.items():
        assert min(cost.fixed_s, cost.run_s, cost.byte_s) >= 0
        largest = max(one.num_bytes for one in found[lane])
        quickest = min(
            (one for one in found[lane] if one.num_bytes == largest), key=lambda one: one.seconds
        )
        told = cost.seconds(quickest.num_bytes, quickest.num_runs)
        assert told == pytest.approx(quickest.seconds, rel=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    fixed_s=st.lists(st.floats(0, 1e-2), min_size=3, max_size=3),
    gbps=st.lists(st.floats(0.5, 400), min_size=2, max_size=2),
    nixl_run_s=st.floats(0, 1e-5),
    run_bytes=st.integers(1 << 10, 1 << 21),
)
def test_costs_that_made_the_samples_are_found(
    fixed_s: list[float], gbps: list[float], nixl_run_s: float, run_bytes: int
) -> None:
    """Where the path gives to NIXL what it gives to the quickest lane."""
    byte_s = [1e-9 / rate for rate in gbps]
    true = {
        PEER: LaneCost(fixed_s[0], 0.0, byte_s[0]),
        STAGED: LaneCost(fixed_s[1], 0.0, byte_s[1]),
        NIXL: LaneCost(fixed_s[2], nixl_run_s, min(byte_s)),
    }
    sizes = [(runs * run_bytes, runs) for runs in (64, 1024)]
    found = fit(
        {
            lane: [Sample(*size, cost.seconds(*size)) for size in sizes]
            for lane, cost in true.items()
        }
    )
    for lane, cost in true.items():
        for size in (*sizes, (4 * sizes[1][0], sizes[1][1]), (sizes[1][0], 5000)):
            assert found[lane].seconds(*size) == pytest.approx(cost.seconds(*size), rel=1e-3)


COSTS = {
    PEER: LaneCost(1e-4, 0.0, 1 / 300e9),
    STAGED: LaneCost(5e-4, 0.0, 1 / 400e9),
    NIXL: LaneCost(2e-5, 1e-6, 1 / 300e9),
    PUSHED: LaneCost(0.0, 0.0, 0.0),
}


@pytest.mark.parametrize(
    ("settled", "plan", "connectors", "wanted"),
    [
        (PEER, plan_of(4, 16 * 1024), "all", NIXL),
        (NIXL, plan_of(1000, 1 << 10), "all", PEER),
        (NIXL, plan_of(1000, 1 << 10), "nixl staged", STAGED),
        (PEER, plan_of(1, 4 << 30), "all", STAGED),
        (PEER, plan_of(1, 4 << 30), "peer nixl", PEER),
        (STAGED, plan_of(500, 1 << 20), "all", STAGED),
        (PUSHED, plan_of(1000, 1 << 10), "all", PUSHED),
        (Lane("loopback", Direction.PULL), plan_of(1, 1), "all", Lane("loopback", Direction.PULL)),
    ],
)
def test_each_plan_takes_what_is_clearly_cheaper(
    settled: Lane, plan: TransferPlan, connectors: str, wanted: Lane
) -> None:
    names = ("peer", "nixl", "staged") if connectors == "all" else connectors.split()
    found = cheapest(settled, COSTS, names, [plan])
    assert found == wanted
    assert cheapest(settled, {}, names, [plan]) == settled


def test_only_what_proved_to_work_is_known() -> None:
    measured = LaneSamples()
    for lane in LANES:
        measured.add(lane, MIB, 16, 1000)
        measured.add(lane, 16 * MIB, 256, 16_000)
    assert set(measured.costs([NIXL, PUSHED])) == {NIXL}
