"""`kvxfer bench transfer`: what it measures with, and that a wrong byte fails it.

Most tests run the two ends as threads of this process, over the loopback connector: to start two
processes and import torch in each costs seconds. One has real processes, as one of
test_bench_connectors.py has, which is run by default.
"""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.bench.scratch import driver_of
from kvxfer.bench.transfer import CASES, TransferOptions, run_transfer
from kvxfer.bench.transfer_cases import Bench, figures_of
from kvxfer.bench.transfer_end import End
from kvxfer.bench.transfer_fill import clear, fill, is_filled
from kvxfer.bench.transfer_pair import Pair
from kvxfer.bench.transfer_rounds import measure, setup_of, work_of
from kvxfer.bench.transfer_serve import serve
from kvxfer.bench.transfer_shapes import (
    RUN_KIB,
    Shape,
    blocks_for,
    capacity_for,
    random_places,
    shape_of,
)
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, GroupGeometry, KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.cli import app
from kvxfer.command import run_app
from kvxfer.errors import WorkerDied
from kvxfer.transfer.plan import CacheSide, plan_transfer
from kvxfer.transfer.regions import Region, RegionSet

RECORD = {
    "metric", "value", "unit", "bar", "better", "ok", "runs", "spread_iqr", "machine", "versions",
    "commit", "command",
}  # fmt: skip
QUICK: dict[str, Any] = {"devices": "cpu,cpu", "runs": 1, "warm_up": 0, "host_mib": 2}


class ThreadEnd(threading.Thread):
    """An end in a thread, with what is asked of a process."""

    exitcode: int | None = None

    def kill(self) -> None:
        raise AssertionError("an end did not stop by itself")


def in_threads(kind: type[End]) -> Callable[..., ThreadEnd]:
    def start(
        ours: Connection, theirs: Connection, role: str, device: str, env: Mapping[str, str]
    ) -> ThreadEnd:
        thread = ThreadEnd(target=_serve, args=(theirs, role, device, kind))
        thread.start()
        return thread

    return start


def _serve(pipe: Connection, role: str, device: str, kind: type[End]) -> None:
    with pipe:
        serve(pipe, role, device, kind)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pair, "start", staticmethod(in_threads(End)))


class CorruptingEnd(End):
    """One bit of what arrived is turned over."""

    def check(self, group, blocks, seed):
        view = self.cache.views[group][-1]
        view.view(torch.uint8)[blocks[-1], 0, 3, 100] ^= 4
        return super().check(group, blocks, seed)


def kept(path: Path) -> dict[str, Any]:
    """Figures by metric, each complete."""
    figures = json.loads(path.read_text())
    assert figures
    assert all(set(figure) == RECORD and figure["machine"] for figure in figures)
    return {figure["metric"]: figure for figure in figures}


@pytest.mark.parametrize("run_kib", RUN_KIB)
def test_a_shape_comes_to_runs_of_its_size(run_kib: int) -> None:
    shape = shape_of(run_kib)
    blocks = blocks_for(shape.spec, 16 << 20)
    capacity = capacity_for(blocks)
    geometry = GroupGeometry.build(shape.spec, shape.layout, capacity, 1 << 21)
    everything = RegionSet((Region(0, geometry.total_bytes),), 1)
    # Every other block, so that no neighbours join.
    sides = [CacheSide(geometry, everything, range(side, capacity, 2))
             for side in (0, 1)]  # fmt: skip
    plan = plan_transfer(*sides, range(blocks * shape.spec.block_size))
    assert set(plan.sizes.tolist()) == {run_kib << 10}
    assert plan.total_bytes == blocks * shape.spec.block_bytes


@settings(max_examples=25, deadline=None)
@given(
    layout=st.sampled_from(list(KVCacheLayout)),
    seed=st.integers(1, 2000),
    where=st.tuples(*(st.integers(0, n - 1) for n in (2, 3, 2, 4, 32))),
    bit=st.integers(0, 7),
)
def test_any_wrong_bit_shows(layout, seed: int, where, bit: int) -> None:
    spec = KVCacheSpec(2, 2, 8, 8, "bfloat16", 4)
    driver = driver_of("cpu")
    cache = KVCache(driver, CacheGeometry.build([spec], [layout], [9], driver.granularity))
    try:
        cache.extend([9])
        views, blocks = cache.views[0], [7, 2, 4]
        fill(views, blocks, seed)
        assert is_filled(views, blocks, seed)
        assert not is_filled(views, blocks, seed + 1)
        assert not is_filled(views, [2, 7, 4], seed)
        layer, index, *rest = where
        views[layer].view(torch.uint8)[(blocks[index], *rest)] ^= 1 << bit
        assert not is_filled(views, blocks, seed)
        clear(views, blocks)
        assert not any(bool(view[blocks].any()) for view in views)
    finally:
        cache.close()


def test_what_is_filled_does_not_depend_on_the_layout() -> None:
    shape = (5, 2, 4, 16)
    ours = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)]
    theirs = [torch.zeros((4, 5, 2, 16), dtype=torch.bfloat16).permute(1, 2, 0, 3)] * 1
    theirs += [torch.zeros((2, 5, 4, 16), dtype=torch.bfloat16).transpose(0, 1)]
    fill(ours, [1, 3], 5)
    for source, target in zip(ours, theirs, strict=True):
        assert target.shape == shape
        target[[4, 2]] = source[[1, 3]]
    assert is_filled(theirs, [4, 2], 5)


@given(st.integers(1, 30), st.integers(0, 100))
def test_places_are_distinct_and_not_the_null_block(num_blocks: int, seed: int) -> None:
    places = random_places(num_blocks, range(1, capacity_for(num_blocks)), seed)
    assert len(set(places)) == num_blocks
    assert set(places) <= set(range(1, capacity_for(num_blocks)))


def test_a_host_case_is_measured_and_kept(threads, tmp_path: Path) -> None:
    path = tmp_path / "transfer.json"
    words = ["--devices", "cpu,cpu", "--host-mib", "4", "--runs", "3", "--warm-up", "1"]
    words += ["--peer-connector", "loopback", "--sizes", "64", "--sizes", "2048"]
    code = run_app(app, ["bench", "transfer", "peer-host", *words, "--json", str(path)])
    figures = kept(path)
    share = figures["peer on the host 64KiB: share of a contiguous copy"]
    assert share["bar"] == 0.9
    assert share["runs"] == 3
    assert code == (0 if all(figure["ok"] for figure in figures.values()) else 1)
    rates = [figures[f"peer on the host 2MiB: {name}"]["value"]
             for name in ("rate", "contiguous copy", "planning")]  # fmt: skip
    assert min(rates) > 0
    assert share["command"].startswith("kvxfer bench transfer peer-host --devices cpu,cpu")


def test_all_layouts_arrive(threads) -> None:
    options = TransferOptions(**QUICK | {"host_mib": 4}, peer_connector="loopback")
    figures = list(figures_of("peer-layouts", Bench(options, ("cpu", "cpu"))))
    rates = {f.metric: f.value for f in figures if f.metric.endswith(": rate")}
    assert len(rates) == 36
    assert min(rates.values()) > 0
    assert 0 < figures[0].value <= 1
    assert figures[0].bar == 0.9


def test_nixl_is_compared_with_bare_nixl(threads, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVXFER_NIXL_PROGRESS_THREAD", "0")
    path = tmp_path / "transfer-nixl-overhead.json"
    options = TransferOptions(**QUICK, sizes=(64,), json_dir=tmp_path)
    code = run_transfer("nixl-overhead", options)
    figures = kept(path)
    ratio, *rates = figures.values()
    assert ratio["bar"] == 0.95
    assert code == (0 if ratio["ok"] else 1)
    ours, *bare = (figure["value"] for figure in rates)
    assert ratio["value"] == pytest.approx(ours / max(bare))
    assert "json-dir" not in ratio["command"]


@pytest.mark.parametrize("case", ["peer-host", "peer-layouts"])
def test_a_wrong_bit_fails_a_case(monkeypatch, case: str, capsys) -> None:
    monkeypatch.setattr(Pair, "start", staticmethod(in_threads(CorruptingEnd)))
    words = ["--devices", "cpu,cpu", "--host-mib", "4", "--runs", "1", "--warm-up", "0"]
    words += ["--peer-connector", "loopback"]
    assert run_app(app, ["bench", "transfer", case, *words]) == 1
    assert "differs from the source" in capsys.readouterr().err


def test_what_cannot_be_measured_says_why(capsys) -> None:
    options = TransferOptions(**QUICK, peer_connector="none_such", staged_connector="none_such")
    for case in CASES:
        if case != "nixl-overhead":
            assert run_transfer(case, options) == 0
            printed = capsys.readouterr().out
            assert "not measured" in printed
            assert "none_such" in printed or "needs" in printed


def test_all_goes_on_after_a_case_that_failed(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr("kvxfer.bench.transfer.CASES", {"peer-host": "a", "peer-layouts": "b"})
    monkeypatch.setattr(Pair, "start", staticmethod(in_threads(CorruptingEnd)))
    options = TransferOptions(**QUICK, peer_connector="loopback", json_dir=tmp_path)
    assert run_transfer("all", options) == 1
    printed = capsys.readouterr().out
    assert printed.count("failed: ") == 2


@pytest.mark.slow
def test_real_processes_move_bytes_and_leave_nothing_behind(leaves_nothing_behind) -> None:
    setup = setup_of([shape_of(64), Shape(shape_of(2048).spec, KVCacheLayout.LHBNC)], 4 << 20)
    works = [work_of("equal", setup, 4 << 20, (0, 0)), work_of("mixed", setup, 4 << 20, (1, 0))]
    with Pair("cpu", "cpu") as pair:
        pair.open("peer", setup)
        found = measure(pair, works, 0, 1, with_runs=False)
        assert min(statistics.median(series.gbps) for series in found.values()) > 0
        ends = [psutil.Process(pair.process_id(role)) for role in ("source", "target")]
        ends[0].kill()
        with pytest.raises(WorkerDied, match="source's process ended with code -9"):
            pair.ask("source", "run")
    assert not any(end.is_running() for end in ends)


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        (["peer-nothing"], "--runs", "5"),
        (["peer-host"], "--runs", "0"),
        (["peer-host"], "--sizes", "5"),
        (["peer-host"], "--devices", "cpu"),
        (["peer-host"], "--devices", "cpu,cuda:99"),
        (["all"], "--json", "x.json"),
        (["peer-host"], "--json-dir", "/nonexistent/place"),
    ],
)
def test_bad_options_are_refused(command: list[str], option: str, value: str, capsys) -> None:
    assert run_app(app, ["bench", "transfer", *command, option, value]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    named = "case" if "nothing" in command[0] else option.removeprefix("--").split("-")[0]
    assert named.rstrip("s") in lines[0]
