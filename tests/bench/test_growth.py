"""`kvxfer bench growth`: what it counts, that every step is there, and that it would tell of a
wrong byte, of a block that is lost, and of a worker that dies.

Most tests turn the two workers in this process, over the loopback connector; two have the real
command with real processes, forked from one that has imported what they need.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.cluster import Cluster
from support.fork_server import ForkServer

from kvxfer.bench import growth_end
from kvxfer.bench.growth import GrowthOptions
from kvxfer.bench.growth_cases import Case, cases_of
from kvxfer.bench.growth_end import GrowthEnd
from kvxfer.bench.growth_figures import PARTS, WHO, Found, InFlight, figures_of, total
from kvxfer.bench.growth_flow import Moved
from kvxfer.bench.growth_plot import draw
from kvxfer.bench.growth_runs import measure
from kvxfer.bench.growth_screen import WIDTH, bar, mark
from kvxfer.bench.growth_steps import (
    GROW_STEPS,
    SHRINK_STEPS,
    Grown,
    Lap,
    Laps,
    Shrunk,
    grow_steps,
    shrink_steps,
)
from kvxfer.bench.report import Figure
from kvxfer.cli import app
from kvxfer.command import run_app
from kvxfer.errors import TransferError, UsageError
from kvxfer.transfer.connector import Direction
from kvxfer.transfer.lanes import Lane

RECORD = {
    "metric", "value", "unit", "bar", "better", "ok", "runs", "spread_iqr", "machine", "versions",
    "commit", "command",
}  # fmt: skip
ROLES = {"source": "prefill", "target": "decode"}
FEW = ("--devices", "cpu,cpu", "--connectors", "peer", "--sizes", "4", "--transfer-mib", "2",
       "--transfers", "2", "--warm-up", "0")  # fmt: skip


class PairHere:
    """A GrowthPair whose workers are of this process."""

    def __init__(self, cluster: Cluster, case: Case) -> None:
        self._cluster = cluster
        elastic = {"kv_commit": "elastic", "idle": True}
        workers = cluster.pair(
            case.lane.direction,
            **{
                ROLES[role]: {
                    **elastic,
                    "kv_initial_blocks": case.base_blocks(role),
                    "engine": {"capacity": case.capacity_blocks(role)},
                }
                for role in ROLES
            },
        )
        self._told = {}
        self._theirs = []
        for role, worker in zip(ROLES, workers, strict=True):
            self._told[role], theirs = Pipe()
            self._theirs.append(theirs)
            end = GrowthEnd(worker.parts, theirs, ROLES[role], case.transfer_blocks)
            worker.loop.also(end.handlers)
            worker.role.tick = end.tick
        self.base_blocks = {role: self.ask(role, "meet") for role in ROLES}
        for role in ROLES:
            self.ask(role, "prepare")

    def ask(self, role: str, verb: str, *arguments: object) -> Any:
        told = self._told[role]
        told.send((verb, arguments))
        self._cluster.until(told.poll)
        is_error, value = told.recv()
        if is_error:
            raise TransferError(value)
        return value

    def close(self) -> None:
        for pipe in (*self._told.values(), *self._theirs):
            pipe.close()


def case_of(direction: Direction) -> Case:
    """Of blocks of the test's workers, which are small: as many as of 64 MiB of the bench's."""
    return Case(Lane("loopback", direction), 64, dict.fromkeys(ROLES, "cpu"), "LBHNC", 2)


def run_here(cluster: Cluster, direction: Direction, options: GrowthOptions, found: Found) -> None:
    case = case_of(direction)
    pair = PairHere(cluster, case)
    try:
        for _ in measure(pair, case, options, found):  # type: ignore[arg-type]
            pass
    finally:
        pair.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_every_step_of_every_round_is_found(cluster: Cluster, direction: Direction) -> None:
    found, options = Found("loopback", 64), GrowthOptions(runs=2, warm_up=1, transfers=3)
    run_here(cluster, direction, options, found)
    assert found.is_complete
    assert (len(found.grows), len(found.shrinks), len(found.sleeps), len(found.wakes)) == (
        2,
        4,
        2,
        2,
    )
    for _, names, where in PARTS:
        for steps in getattr(found, where):
            assert list(steps) == list(names)
            assert min(steps.values()) >= 0
            assert total(steps, names) > 0
    assert (found.num_wrong, found.num_lost, found.num_outlived) == (0, 0, 0)
    assert found.grown_bytes > 0
    assert found.woken_bytes > found.grown_bytes
    # Of 3 rounds: 2 flows of 6 transfers at least; of each round of either kind one more alone;
    # and the new block of 2 growths, of a wake-up, and of the last growth of all.
    assert found.num_verified >= 3 * (2 * 6 + 2 + 2 + 1) + 1
    for who in WHO:
        assert [len(one.others) >= 6 for one in found.beside[who]] == [True, True]
    figures = {figure.metric: figure for figure in figures_of(found, options)}
    assert all(figure.ok for figure in figures.values())
    whole = figures["loopback 64 MiB: growth: until the first verified transfer"]
    assert whole.runs == 2


def flipping(what: list[int], seeds: tuple[int, int]) -> Callable[..., bool]:
    """As `is_filled`, after a bit of what was to be compared was turned over."""
    compare = growth_end.is_filled

    def is_filled(views: Any, blocks: Any, seed: int) -> bool:
        if seeds[0] <= seed < seeds[1]:
            what.append(seed)
            views[-1].view(dtype=torch.uint8)[blocks[-1], 1, 2, 3] ^= 4
        return compare(views, blocks, seed)

    return is_filled


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ((1000, 2000), "the new block arrived with other contents"),
        ((7, 8), "transfers arrived with wrong bytes"),
        ((3, 4), "a block below the bound"),
    ],
)
def test_a_wrong_bit_ends_it(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    direction: Direction,
    seeds: tuple[int, int],
    said: str,
) -> None:
    compared: list[int] = []
    monkeypatch.setattr(growth_end, "is_filled", flipping(compared, seeds))
    found, options = Found("loopback", 64), GrowthOptions(runs=1, warm_up=0, transfers=1)
    with pytest.raises(TransferError, match=said):
        run_here(cluster, direction, options, found)
    assert compared
    assert not found.is_complete
    missed = {figure.metric for figure in figures_of(found, options) if not figure.ok}
    assert "loopback 64 MiB: rounds of growth that ended" in missed


def laps(*rows: tuple[str, float, float]) -> list[Lap]:
    return [Lap(*row) for row in rows]


NEAR = laps(
    ("extend", 10.1, 11.0), ("register", 11.0, 11.5), ("describe", 11.5, 11.6),
    ("describe", 11.6, 11.7), ("connect", 8.0, 30.0),
)  # fmt: skip


def test_steps_of_a_growth_lie_end_to_end() -> None:
    grown = Grown(10.0, 13.0, 13.5, 15.0, 1, NEAR)
    far = laps(("connect", 9.0, 9.5), ("connect", 12.0, 12.75), ("renew", 12.0, 12.5))
    steps = grow_steps(grown, far, {"moved": 14.0})
    expected = [1000, 500, 200, 300, 750, 250, 500, 500, 1000]
    assert list(steps.values()) == pytest.approx(expected)
    assert total(steps, GROW_STEPS) == pytest.approx((15.0 - 10.0) * 1e3)
    earlier = grow_steps(grown, far, {"moved": 14.0, "verified": 14.25})
    assert earlier["verify"] == pytest.approx(250)


def test_steps_of_a_shrink_lie_end_to_end() -> None:
    near = laps(
        ("revoke", 1.0, 2.0), ("deregister", 5.0, 5.5), ("shrink", 5.5, 7.0), ("revoke", 9.0, 9.5)
    )
    steps = shrink_steps(Shrunk(0.5, 8.0, 0, near), laps(("renew", 3.0, 4.5)))
    expected = [1500, 1000, 1500, 500, 500, 1500, 1000]
    assert list(steps.values()) == pytest.approx(expected)
    assert total(steps, SHRINK_STEPS) == pytest.approx(7500)


def test_a_step_that_is_missing_or_out_of_order_is_told() -> None:
    grown = Grown(10.0, 13.0, 13.5, 15.0, 1, NEAR)
    with pytest.raises(TransferError, match="nothing did connect"):
        grow_steps(grown, laps(("connect", 9.0, 9.5)), {"moved": 14.0})
    with pytest.raises(TransferError, match="publish ended 200"):
        grow_steps(grown, laps(("connect", 11.5, 12.0)), {"moved": 14.0})
    with pytest.raises(TransferError, match="no memory"):
        shrink_steps(
            Shrunk(0.5, 8.0, 0, laps(("revoke", 1.0, 2.0), ("deregister", 5.0, 5.5))),
            laps(("renew", 3.0, 4.5)),
        )


def test_what_is_listened_to_does_what_it_did() -> None:
    class Part:
        def double(self, value: int) -> int:
            if value < 0:
                raise ValueError(value)
            return 2 * value

    part, heard = Part(), Laps()
    heard.listen(part, "double")
    assert part.double(3) == 6
    with pytest.raises(ValueError, match="-1"):
        part.double(-1)
    assert [lap.name for lap in heard.take()] == ["double", "double"]
    assert heard.take() == []


def test_transfers_are_told_apart_by_the_growth_they_overlap() -> None:
    spans = ((8.0, 9.0), (9.0, 10.5), (10.6, 11.1), (11.5, 13.5), (13.0, 14.0))
    grown = Grown(10.0, 12.0, 12.0, 20.0, 1, [])
    found = InFlight.of(Moved(spans, 3_000_000_000, 5, 0), grown)
    assert found.during == pytest.approx((2.0, 6.0, 1.5))
    assert found.others == pytest.approx((3.0, 3.0))
    assert found.ratio == pytest.approx(2 / 3)
    assert found.p95_ratio == pytest.approx((1.5 + 0.9 * 0.5) / 1.0)


def test_a_bar_is_as_long_as_its_sum() -> None:
    steps = {name: float(index) / 7 for index, name in enumerate(GROW_STEPS)}
    longest = total(steps, GROW_STEPS)
    assert sum(columns for *_, columns in bar(steps, GROW_STEPS, longest)) == WIDTH
    assert sum(columns for *_, columns in bar(steps, GROW_STEPS, 2 * longest)) == WIDTH // 2
    for names in (GROW_STEPS, SHRINK_STEPS):
        assert len({mark(name) for name in names}) == len(names)


def test_bars_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is optional: kvxfer[bench]")
    found = Found("peer/pull", 64)
    found.grows.append(dict.fromkeys(GROW_STEPS, 1.0))
    found.sleeps.append(dict.fromkeys(SHRINK_STEPS, 2.0))
    path = tmp_path / "growth.svg"
    draw([found], "a machine", path)
    first = path.read_bytes()
    assert b"<svg" in first
    draw([found], "a machine", path)
    assert path.read_bytes() == first, "the same figures give the same picture"


def test_lanes_and_sizes_make_cases() -> None:
    options = GrowthOptions(connectors="nixl,peer")
    cases, left_out = cases_of(options, ("cpu", "cpu"), (2, 64))
    assert [str(case.lane) for case in cases[::2]] == ["nixl/push", "nixl/pull", "peer/pull"]
    assert [case.num_blocks for case in cases[:2]] == [1, 32]
    assert not left_out
    owners = {case.lane.direction: (case.owner, case.mover) for case in cases}
    assert owners[Direction.PULL] == ("source", "target")
    assert owners[Direction.PUSH] == ("target", "source")
    assert cases_of(GrowthOptions(), ("cpu", "cpu"), (2,))[0]


def test_a_size_that_does_not_fit_names_what_is_free() -> None:
    with pytest.raises(UsageError, match=r"sizes: 99999999: needs \d+ MiB of cpu, of which \d+"):
        cases_of(GrowthOptions(connectors="peer"), ("cpu", "cpu"), (2, 99999999))


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--sizes", "0", "sizes"),
        ("--sizes", "1", "sizes"),
        ("--sizes", "99999999", "free"),
        ("--connectors", "none_such", "no such module"),
        ("--runs", "0", "runs"),
        ("--warm-up", "-1", "warm_up"),
        ("--transfers", "0", "transfers"),
        ("--transfer-mib", "0", "transfer_mib"),
        ("--layout", "XX", "layout"),
        ("--devices", "tpu", "devices"),
        ("--lane", "sideways", "lane"),
        ("--plot", "x.txt", "plot"),
        ("--json", "/nonexistent/place/x.json", "json"),
    ],
)
def test_bad_options_are_refused(
    option: str, value: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = () if option == "--devices" else ("--devices", "cpu,cpu")
    assert run_app(app, ["bench", "growth", *words, option, value]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert named.replace("free", "can be had") in lines[0]
    assert value in lines[0]


def test_a_lane_that_no_connector_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--devices", "cpu,cpu", "--connectors", "peer", "--lane", "push"]
    assert run_app(app, ["bench", "growth", *words]) == 2
    assert "lane: 'push': none of peer has such a lane" in capsys.readouterr().err


def kept(path: Path) -> dict[str, Any]:
    """Figures by metric, each complete."""
    figures = json.loads(path.read_text())
    assert all(set(figure) == RECORD and figure["machine"] for figure in figures)
    return {figure["metric"]: figure for figure in figures}


def test_two_processes_are_measured_and_kept(
    tmp_path: Path, leaves_nothing_behind: None, fork_server: ForkServer
) -> None:
    path = tmp_path / "growth.json"
    bars = ("--commit-bar-ms", "60000", "--first-byte-bar-ms", "0.000001")
    done = fork_server.run(
        "kvxfer.cli", "bench", "growth", *FEW, "--runs", "1", *bars, "--json", str(path)
    )
    assert done.code == 1, f"a bar was missed: {done}"
    assert not done.err
    figures = kept(path)
    name = "peer/pull 4 MiB"
    steps = [figures[f"{name}: growth: {step}"]["value"] for step in GROW_STEPS]
    whole = figures[f"{name}: growth: until the first verified transfer"]
    assert whole["value"] == pytest.approx(sum(steps))
    assert (whole["bar"], whole["ok"]) == (0.000001, False)
    assert figures[f"{name}: growth: extend"]["ok"]
    missed = [metric for metric, figure in figures.items() if not figure["ok"]]
    assert missed == [f"{name}: growth: until the first verified transfer"]
    for what in ("shrink: unmap", "sleep: all", "wake: until usable", "growth: rate of extend"):
        assert figures[f"{name}: {what}"]["value"] > 0
    command = whole["command"]
    assert command.startswith("kvxfer bench growth --devices cpu,cpu --connectors peer --sizes 4")
    for text in ("until verified", "e extend", "transfers in flight"):
        assert text in done.out


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_what_is_cut_short_keeps_its_figures_and_leaves_nothing(
    tmp_path: Path, leaves_nothing_behind: None, fork_server: ForkServer, number: signal.Signals
) -> None:
    """A worker is killed; or the command is told to stop."""
    path = tmp_path / "growth.json"
    command = fork_server.start(
        "kvxfer.cli", "bench", "growth", *FEW, "--runs", "100000", "--json", str(path)
    )
    try:
        deadline = time.monotonic() + 60
        while not path.exists():
            assert command.poll() is None, command.communicate(1)
            assert time.monotonic() < deadline
            time.sleep(0.01)
        workers = psutil.Process(command.pid).children()
        assert len(workers) == 2
        os.kill(workers[1].pid if number == signal.SIGKILL else command.pid, number)
        out, err = command.communicate(20)
    finally:
        command.kill()
    assert not any(worker.is_running() for worker in workers)
    figures = kept(path)
    ended = figures["peer/pull 4 MiB: rounds of growth that ended"]
    assert ended["value"] >= 1
    assert not ended["ok"]
    if number == signal.SIGINT:
        assert command.returncode == 130
        assert "Traceback" not in out + err
    else:
        assert command.returncode == 1
        assert "cut short: " in out  # by the launcher, or by the peer, whoever saw it first
        assert "target worker (pid " in out or "target is lost" in out


@pytest.mark.parametrize(
    ("better", "value", "bar", "ok"),
    [
        ("lower", 1.0, 2.0, True),
        ("lower", 3.0, 2.0, False),
        ("higher", 3.0, 2.0, True),
        ("higher", 1.0, 2.0, False),
        ("higher", 1.0, None, True),
    ],
)
def test_a_figure_is_judged_by_its_bar(better, value: float, bar: float | None, ok: bool) -> None:
    assert Figure.of("m", [value], "u", better, bar).ok is ok


def test_a_figure_is_the_median_with_its_spread() -> None:
    figure = Figure.of("m", [1.0, 2.0, 3.0, 4.0, 100.0], "u", "lower")
    assert figure.value == 3.0
    assert figure.runs == 5
    assert figure.spread_iqr > 0
