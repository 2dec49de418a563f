"""`kvxfer bench connectors`: what it measures, that a wrong byte fails it, and what is left of a
run that goes wrong.

Most tests run the two ends as threads of this process, as those of `kvxfer bench transfer` do.
"""

from __future__ import annotations

import csv
import json
import multiprocessing
import statistics
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.bench.connectors import lanes
from kvxfer.bench.connectors.columns import COLUMNS, HIDDEN, fitting, table_width
from kvxfer.bench.connectors.end import ConnectorsEnd
from kvxfer.bench.connectors.journal import Journal
from kvxfer.bench.connectors.lanes import lanes_of
from kvxfer.bench.connectors.measure import Samples, aim_of
from kvxfer.bench.connectors.memory import check_memory, needs_of
from kvxfer.bench.connectors.moves import Timed
from kvxfer.bench.connectors.options import ConnectorsOptions
from kvxfer.bench.connectors.pair import ConnectorsPair
from kvxfer.bench.connectors.report import Report, read_report
from kvxfer.bench.connectors.shapes import Ends, shapes_of
from kvxfer.bench.connectors.summary import latency_of
from kvxfer.bench.connectors.sweep import sizes_of, sweep_of
from kvxfer.bench.connectors.values import size_of, size_text
from kvxfer.bench.results import read_results
from kvxfer.bench.transfer_serve import serve
from kvxfer.cache.layout import GroupGeometry, KVCacheLayout
from kvxfer.cli import app
from kvxfer.command import run_app
from kvxfer.errors import UsageError
from kvxfer.transfer.plan import CacheSide, plan_transfer
from kvxfer.transfer.regions import Region, RegionSet

TINY = ["--block_sizes", "4KiB", "--batch_sizes", "1,3", "--num_iter", "2", "--warmup_iter", "1"]


class ThreadEnd(threading.Thread):
    """An end in a thread, with what is asked of a process."""

    exitcode: int | None = None

    def kill(self) -> None:
        raise AssertionError("an end did not stop by itself")


def in_threads(monkeypatch: pytest.MonkeyPatch, kind: type[ConnectorsEnd]) -> None:
    def start(
        ours: Connection, theirs: Connection, role: str, device: str, env: Mapping[str, str]
    ) -> ThreadEnd:
        thread = ThreadEnd(target=_serve, args=(theirs, role, device, kind))
        thread.start()
        return thread

    monkeypatch.setattr(ConnectorsPair, "start", staticmethod(start))


def _serve(pipe: Connection, role: str, device: str, kind: type[ConnectorsEnd]) -> None:
    with pipe:
        serve(pipe, role, device, kind)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    in_threads(monkeypatch, ConnectorsEnd)


class CorruptingEnd(ConnectorsEnd):
    """One bit of what arrived is turned over, from the third transfer on."""

    count = 0

    def verify(self) -> bool:
        type(self).count += 1
        if self.count > 2:
            view = self.cache.views[0][-1].view(torch.uint8)
            view[self.aimed.dst_blocks[-1], 0, 3, 100] ^= 4
        return super().verify()


def bench(*words: str) -> int:
    return run_app(app, ["bench", "connectors", *words])


def trials(**changes: Any) -> list[Any]:
    return list(sweep_of(ConnectorsOptions(connectors="loopback", **changes), 0).trials)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(KVCacheLayout)),
    st.sampled_from(list(KVCacheLayout)),
    st.sampled_from([(1, 1), (2, 2), (1, 2), (4, 1)]),
    st.sampled_from([512, 1536, 4096, 65536, 3 << 16]),
)
def test_a_pair_of_shapes_comes_to_runs_of_its_size(source, target, sizes, run_bytes: int) -> None:
    shapes = shapes_of(run_bytes, Ends(source, target, *sizes), 3, 8)
    batch, geometries = 3, []
    for shape in (shapes.source, shapes.target):
        geometries.append(GroupGeometry.build(shape.spec, shape.layout, 8, 1 << 16))
    sides = [
        CacheSide(one, RegionSet((Region(0, one.total_bytes),), 1), range(side, 7, 2)[:batch])
        for side, one in enumerate(geometries)
    ]
    plan = plan_transfer(*sides, range(batch * shapes.source.spec.block_size))
    assert plan.total_bytes == batch * shapes.block_bytes
    found = plan.sizes.tolist()
    if source == target:
        assert set(found) == {run_bytes}
    # Elsewhere a layer's last run and the next one's first may be neighbours at both ends.
    assert statistics.multimode(found) == [run_bytes]
    assert all(size % run_bytes == 0 for size in found)


def test_options_of_nixlbench_mean_the_same(capsys) -> None:
    options = ConnectorsOptions(start_block_size="4096", max_block_size="65536", max_batch_size=4)
    assert sizes_of(options) == ([4096, 8192, 16384, 32768, 65536], [1, 2, 4])
    kinds = [t.kind for t in trials(op_type="write", num_layers=1, layouts="BLHNC")]
    assert {kind.operation for kind in kinds} == {"WRITE"}
    assert (kinds[0].initiator_memory, kinds[0].target_memory) == ("DRAM", "DRAM")
    for trial in trials(num_layers=1):
        assert trial.size_bytes == trial.kind.block_bytes * trial.kind.batch


def test_gpu_memory_goes_to_the_side_that_it_is_of() -> None:
    options = ConnectorsOptions(
        connectors="loopback", initiator_seg_type="VRAM", target_seg_type="DRAM,VRAM"
    )
    found = {
        (t.kind.operation, t.kind.target_memory): t.setting.devices
        for t in sweep_of(options, 2).trials
    }
    assert found == {
        ("WRITE", "DRAM"): ("cuda:0", "cpu"),
        ("READ", "DRAM"): ("cpu", "cuda:0"),
        ("WRITE", "VRAM"): ("cuda:0", "cuda:1"),
        ("READ", "VRAM"): ("cuda:1", "cuda:0"),
    }


@given(st.integers(1, 1 << 40))
def test_a_size_is_read_as_it_is_written(size: int) -> None:
    assert size_of("x", size_text(size)) == size


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=300))
def test_percentiles_are_times_of_runs(seconds: list[float]) -> None:
    found, ordered = latency_of(seconds), sorted(one * 1e6 for one in seconds)
    assert found.p50 <= found.p99 <= found.p999
    for value, share in ((found.p50, 0.5), (found.p99, 0.99), (found.p999, 0.999)):
        assert value in ordered
        assert sum(one <= value for one in ordered) >= share * len(ordered) - 1e-6
        assert sum(one < value for one in ordered) < share * len(ordered)
    assert found.p999 == ordered[-1]  # of fewer than 1,000


def test_of_a_thousand_runs_p999_is_not_the_longest() -> None:
    found = latency_of([*[1e-6] * 989, *[2e-6] * 10, 1.0])
    assert (found.p50, found.p99, found.p999) == pytest.approx((1, 2, 2))


def a_row(problem: str = "", num_runs: int = 3):
    trial = trials()[0]
    timed = Timed(1e-3, 2e-3, 3e-3, trial.size_bytes, 4)
    samples = Samples([timed] * num_runs, [1.0] * num_runs, 3 * trial.size_bytes)
    return samples.row(trial, "memcpy of 16KiB", problem)


def test_a_row_is_what_its_runs_come_to() -> None:
    row = a_row()
    assert row.gb_per_s.median == pytest.approx(16384 / 5e-3 / 1e9)
    assert row.share == row.gb_per_s
    assert (row.prepare_us, row.post_us, row.transfer_us) == pytest.approx((1e3, 2e3, 3e3))
    assert row.latency_us.average == pytest.approx(5e3)
    assert row.bytes_per_descriptor == 4096


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 300])
def test_a_narrow_table_keeps_what_matters(width: int) -> None:
    rows = [a_row(), a_row("died", 0)]
    columns = fitting(rows, width)
    assert table_width(columns, rows) <= max(width, table_width(columns[:1], rows))
    ranks = sorted(column.rank for column in COLUMNS)
    assert sorted(column.rank for column in columns) == ranks[: len(columns)]
    if width == 300:
        assert len(columns) == sum(column.rank < HIDDEN for column in COLUMNS)
    if width == 60:
        assert {"block", "batch", "GB/s", "share", "p50"} <= {one.title for one in columns}


def test_a_tiny_sweep_is_measured_shown_and_kept(threads, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("KVXFER_NIXL_PROGRESS_THREAD", "0")
    path, table = tmp_path / "bench.json", tmp_path / "bench.csv"
    words = [*TINY, "--connectors", "loopback,nixl", "--json", str(path), "--csv", str(table)]
    assert bench(*words) == 0
    report = read_report(path)
    assert report.is_complete
    assert report.problems == []
    kinds = {(r.kind.connector, r.kind.operation, r.kind.batch) for r in report.rows}
    assert len(kinds) == len(report.rows) == 2 * 2 * 2
    ceilings = {one.name: one.gb_per_s.median for one in report.ceilings}
    for row in report.rows:
        size = 4 * 4096 * row.kind.batch
        assert row.runs == 2
        assert row.verified_bytes == 2 * size
        assert 0 < row.gb_per_s.median < 100
        assert ceilings[row.ceiling] > 0
        assert row.latency_us.p50 <= row.latency_us.p999
        assert row.descriptors == 4 * row.kind.batch
    assert {"memcpy of 16KiB", "socket of 48KiB"} <= ceilings.keys()
    assert all(value > 0 for value in ceilings.values())
    assert report.command.startswith("kvxfer bench connectors --connectors loopback,nixl")
    lines = list(csv.DictReader(table.read_text().splitlines()))
    assert [float(line["gb_per_s"]) for line in lines] == [r.gb_per_s.median for r in report.rows]
    printed = capsys.readouterr().out
    for text in ("loopback push", "nixl pull", "48KiB", "p999, is the longest"):
        assert text in " ".join(printed.split())


def test_a_share_below_the_bar_is_kept_as_missed(threads, tmp_path: Path) -> None:
    report, figures = tmp_path / "report.json", tmp_path / "figures.json"
    words = [*TINY, "--connectors", "loopback", "--json", str(report), "--figures", str(figures)]
    assert bench(*words, "--bar", "100") == 1
    rows, found = read_report(report).rows, read_results(figures)
    shares = {one.metric: one for one in found if one.unit == "×"}
    metric = "loopback WRITE, DRAM to DRAM, LBHNC>LBHNC, chunks of 64MiB, 3 × 4KiB: share of memcpy"
    assert (shares[metric].bar, shares[metric].ok, shares[metric].runs) == (100, False, 2)
    assert [one.value for one in shares.values()] == [row.share.median for row in rows]
    rates = [one for one in found if one.unit == "GB/s"]
    assert [one.value for one in rates] == [row.gb_per_s.median for row in rows]
    assert bench(*words) == 0
    assert {one.bar for one in read_results(figures)} == {None}


def test_peer_is_not_asked_to_map_what_has_no_chunks() -> None:
    options = ConnectorsOptions(connectors="peer,nixl", chunk_sizes="fixed,64MiB")
    sweep = sweep_of(options, 0)
    found = {(trial.lane.name, trial.kind.chunk_bytes > 0) for trial in sweep.trials}
    assert found == {("peer", True), ("nixl", True), ("nixl", False)}
    assert [one.split(":")[0] for one in sweep.problems] == ["peer"]


def test_layouts_ranks_and_chunks_arrive(threads, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    words = ["--connectors", "loopback", "--batch_sizes", "2", "--num_iter", "1"]
    words += ["--warmup_iter", "0", "--block_sizes", "4KiB", "--num-layers", "2"]
    words += ["--layouts", "LBHNC:BHLNC,BLNHC", "--tensor-parallel-sizes", "1,2:1,1:4"]
    words += ["--chunk-sizes", "64KiB,fixed", "--json", str(path)]
    assert bench(*words) == 0
    rows = read_report(path).rows
    assert len({row.kind for row in rows}) == 2 * 3 * 2 * 2
    assert {row.kind.layouts for row in rows} >= {"LBHNC>BHLNC", "BLNHC/1>BLNHC/4"}
    assert min(row.verified_bytes for row in rows) > 0


def test_a_wrong_bit_gives_its_connector_up(monkeypatch, tmp_path: Path, capsys) -> None:
    in_threads(monkeypatch, CorruptingEnd)
    monkeypatch.setattr(CorruptingEnd, "count", 0)
    path = tmp_path / "bench.json"
    assert bench(*TINY, "--connectors", "loopback", "--json", str(path)) == 1
    report = read_report(path)
    assert not report.is_complete
    (row,) = report.rows
    assert row.problem.startswith("after 1 of 2 runs: what arrived differs")
    assert row.runs == 1
    assert row.gb_per_s.median > 0
    assert report.problems == ["loopback: given up: 3 more were not measured"]
    assert "NOT COMPLETE" in capsys.readouterr().out


def test_a_plugin_that_nixl_does_not_have_is_named(threads, monkeypatch, tmp_path: Path) -> None:
    """As the user named the connector; of those tried by default it is no failure."""
    monkeypatch.setenv(lanes.BACKEND, "NO_SUCH")
    path = tmp_path / "bench.json"
    assert bench(*TINY, "--connectors", "nixl", "--json", str(path)) == 1
    (row,) = read_report(path).rows
    assert "NIXL has no NO_SUCH plugin that works here" in row.problem
    monkeypatch.setattr(lanes, "DEFAULT", ("nixl", "loopback"))
    assert bench(*TINY, "--op_type", "READ", "--json", str(path)) == 0
    report = read_report(path)
    assert report.is_complete
    assert {row.kind.connector for row in report.rows} == {"loopback"}
    assert "nixl: does not work here: " in report.problems[0]


def test_what_was_found_before_ctrl_c_is_kept(threads, monkeypatch, tmp_path: Path) -> None:
    path, verify, calls = tmp_path / "bench.json", ConnectorsPair.ask, []

    def ask(self, role: str, verb: str, *arguments: object):
        calls.append(verb)
        if calls.count("verify") == 5:
            raise KeyboardInterrupt
        return verify(self, role, verb, *arguments)

    monkeypatch.setattr(ConnectorsPair, "ask", ask)
    with pytest.raises(SystemExit, match="130"):  # cyclopts' own word for Ctrl-C
        bench(*TINY, "--connectors", "loopback", "--json", str(path))
    report = read_report(path)
    assert not report.is_complete
    assert [row.problem for row in report.rows] == ["", "after 0 of 2 runs: stopped by the user"]
    assert report.problems == ["stopped by the user"]
    assert not any(isinstance(thread, ThreadEnd) for thread in threading.enumerate())


def test_a_far_end_that_is_killed_leaves_what_was_found(
    monkeypatch, tmp_path: Path, capsys, leaves_nothing_behind
) -> None:
    """Real processes, and `peer` between them."""
    path, pairs, add = tmp_path / "bench.json", [], Journal.add
    between = ConnectorsPair.between

    def made(*of: Any) -> ConnectorsPair:
        pairs.append(between(*of))
        return pairs[-1]

    def add_and_kill(self: Journal, row: Any) -> None:
        add(self, row)
        if len(self.rows) == 1:
            psutil.Process(pairs[0].process_id("target")).kill()

    monkeypatch.setattr(Journal, "add", add_and_kill)
    monkeypatch.setattr(ConnectorsPair, "between", staticmethod(made))
    assert bench(*TINY, "--connectors", "peer", "--op_type", "READ", "--json", str(path)) == 1
    report = read_report(path)
    first, second = report.rows
    assert first.problem == ""
    assert first.verified_bytes > 0
    assert second.problem.endswith("the target's process ended with code -9")
    assert not report.is_complete
    assert "the target's process ended with code -9" in capsys.readouterr().out
    assert multiprocessing.active_children() == []


def test_what_is_not_installed_is_named_with_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(lanes.NEEDS, "peer", (("no-such-thing",), "pip install 'kvxfer[some]'"))
    found, problems = lanes_of("", "UCX")
    assert "peer" not in [lane.name for lane in found]
    (told,) = [one for one in problems if one.startswith("peer")]
    assert told == "peer: not measured: no-such-thing is not installed: pip install 'kvxfer[some]'"
    with pytest.raises(UsageError, match=r"connectors: 'peer': no-such-thing.*kvxfer\[some\]"):
        lanes_of("loopback,peer", "UCX")


def test_a_connector_is_measured_with_settings_of_its_own() -> None:
    (lane,) = lanes_of("nixl:UCX_TLS=tcp:UCX_NET_DEVICES=lo", "UCX")[0]
    assert lane.module == "nixl"
    assert lane.environment == {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    (other,) = lanes_of("nixl", "LIBFABRIC")[0]
    assert other.environment == {lanes.BACKEND: "LIBFABRIC"}
    assert other.name != "nixl"


def test_memory_is_asked_for_before_anything_starts() -> None:
    sweep = sweep_of(ConnectorsOptions(connectors="loopback", block_sizes="1MiB"), 0)
    most = max(needs_of(trial, is_far=False)["cpu"] for trial in sweep.trials)
    assert most > 2 * 2 * 16 * (4 << 20)  # two caches of twice what moves
    check_memory(sweep, {"cpu": most}, is_far=False)
    with pytest.raises(UsageError, match=r"block_sizes: 1048576: .*take.*GiB of host memory.*free"):
        check_memory(sweep, {"cpu": most - 1}, is_far=False)


def test_places_are_the_same_for_every_connector() -> None:
    first, second = (
        aim_of(sweep_of(ConnectorsOptions(connectors=name), 0).trials[1])
        for name in ("peer", "loopback")
    )
    assert first == second
    assert len(set(first.dst_blocks)) == 16
    assert min(first.src_blocks) >= 1


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--connectors", "none_such"], "connectors: 'none_such'"),
        (["--connectors", "nixl,nixl"], "connectors: 'nixl,nixl'"),
        (["--block-sizes", "4000"], "block_sizes: 4000"),
        (["--block-sizes", "4KB x"], "block_sizes: '4KB x'"),
        (["--block-sizes", "64TiB"], "block_sizes"),
        (["--block-sizes", "8GiB", "--batch-sizes", "64"], "are free"),
        (["--block-sizes", "8GiB", "--batch-sizes", "4096"], "block_sizes: 8589934592"),
        (["--block-sizes", "4KiB", "--start_block_size", "4096"], "block_sizes: '4KiB'"),
        (["--start_block_size", "8192", "--max_block_size", "4096"], "max_block_size: 4096"),
        (["--batch-sizes", "0"], "batch_sizes: '0'"),
        (["--op_type", "COPY"], "op_type: 'COPY'"),
        (["--modes", "sideways"], "modes: 'sideways'"),
        (["--connectors", "loopback", "--modes", "staged"], "modes: 'staged'"),
        (["--layouts", "LBHNX"], "layouts: 'LBHNX'"),
        (["--tensor-parallel-sizes", "2:3"], "tensor_parallel_sizes: '2:3'"),
        (["--tensor-parallel-sizes", "1:16"], "tensor_parallel_sizes"),
        (["--chunk-sizes", "1000"], "chunk_sizes: '1000'"),
        (["--total_buffer_size", "1MiB"], "total_buffer_size: '1MiB'"),
        (["--connectors", "peer", "--chunk-sizes", "fixed"], "chunk_sizes: 'fixed'"),
        (["--bar", "-0.1"], "bar: -0.1"),
        (["--figures", "/"], "figures: '/'"),
        (["--num_iter", "0"], "num_iter: 0"),
        (["--warmup_iter", "-1"], "warmup_iter: -1"),
        (["--num-layers", "0"], "num_layers: 0"),
        (["--backend", "POSIX"], "backend: 'POSIX'"),
        (["--json", "/nonexistent/place/x.json"], "json: '/nonexistent/place/x.json'"),
        (["--csv", "/"], "csv: '/'"),
        (["--peer", "10.1.2.3:5000", "--num_iter", "1"], "only loopback addresses are allowed"),
        (["--listen", "10.1.2.3:5000"], "only loopback addresses are allowed"),
        (["--listen", "ipc:///tmp/x"], "listen: 'ipc:///tmp/x'"),
        (["--listen", "127.0.0.1:0", "--key-file", "x.key"], "key_file"),
        (["--peer", "127.0.0.1:9", "--connectors", "nixl:UCX_TLS=tcp"], "do not travel"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(words: list[str], named: str, capsys, tmp_path: Path) -> None:
    assert bench(*words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert named in lines[0]


@pytest.mark.parametrize("name", ["initiator_seg_type", "target_seg_type"])
def test_a_gpu_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no GPU"):
        sweep_of(ConnectorsOptions(**{name: "VRAM"}), 0)
    with pytest.raises(UsageError, match="devices: 'cuda:0,cuda:7'"):
        sweep_of(ConnectorsOptions(devices="cuda:0,cuda:7"), 2)


def test_a_report_reads_back(tmp_path: Path) -> None:
    report = Report("m", {}, "c", "x", {}, [], [a_row()], False, ["why"])
    report.write(tmp_path / "a.json")
    assert read_report(tmp_path / "a.json") == report
    assert json.loads((tmp_path / "a.json").read_text())["format"] == report.format
