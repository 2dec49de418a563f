"""Many simulated peers of one real worker: all are met, told and kept. Never how quickly."""

import json

import pytest
from support.commands import KVXFER, run

from kvxfer.bench.scale import ScaleOptions, run_scale
from kvxfer.bench.scale_worker import read_stamps
from kvxfer.bench.thread_times import KINDS
from kvxfer.errors import UsageError

FEW = (
    "--peers",
    "3",
    "--runs",
    "1",
    "--growths",
    "2",
    "--idle-s",
    "0.2",
    "--cache-bytes",
    "262144",
)
MANY = ("--peers", "64", "--runs", "2", "--growths", "10", "--idle-s", "2")


def check(path, peers, runs, growths):
    """Whatever the bars of time, which are for a quiet machine."""
    begin = f"scale, {peers} peers: "
    recorded = json.loads(path.read_text())
    assert all(one["metric"].startswith(begin) for one in recorded)
    found = {one["metric"].removeprefix(begin): one for one in recorded}
    assert (found["peers lost"]["value"], found["peers lost"]["bar"]) == (0, 0)
    untold = found["updates not told"]
    assert (untold["value"], untold["bar"]) == (0, 0)
    assert untold["unit"] == f"of {runs * growths * peers}"
    for since in ("commit", "first send"):
        p50, p99 = (found[f"RegionsUpdate to the last, from {since}, p{n}"] for n in (50, 99))
        assert 0 < p50["value"] <= p99["value"]
        assert (p50["bar"], p99["bar"], p99["runs"]) == (None, 50.0, runs)
    assert 0 < found["Hello to Welcome, p50"]["value"] <= found["Hello to Welcome, last"]["value"]
    for phase in ("storm", "heartbeats", "no peer yet"):
        name = f"CPU of the worker, {phase}"
        assert found[name]["value"] > 0
        if found[name]["runs"] == 1:
            parts = sum(found[f"{name}: {kind}"]["value"] for kind in KINDS)
            assert found[name]["value"] == pytest.approx(parts)


def test_a_few_peers_are_met_told_and_kept(tmp_path, leaves_nothing_behind, fork_server):
    path = tmp_path / "scale.json"
    done = fork_server.run("kvxfer.cli", "bench", "scale", *FEW, "--json", str(path))
    assert done.code in (0, 1), done
    assert done.err == ""
    check(path, peers=3, runs=1, growths=2)


@pytest.mark.slow
def test_sixty_four_peers_are_met_told_and_kept(tmp_path, leaves_nothing_behind):
    path = tmp_path / "scale.json"
    done = run(*KVXFER, "bench", "scale", *MANY, "--json", str(path), timeout_s=240.0)
    assert done.code in (0, 1), done
    assert done.err == ""
    check(path, peers=64, runs=2, growths=10)


@pytest.mark.parametrize(
    "wrong",
    [{"peers": 0}, {"runs": 0}, {"growths": 1}, {"cache_bytes": 1}, {"idle_s": 0.0}],
    ids=str,
)
def test_bad_options_are_refused_by_name(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(UsageError, match=f"{name}: {value}"):
        run_scale(ScaleOptions(**wrong))


def test_of_stamps_a_line_that_is_not_whole_is_left_out(tmp_path):
    path = tmp_path / "stamps"
    assert read_stamps(path) == {}
    line = json.dumps({"generation": 7, "committed_s": 1.5, "first_send_s": 2.5})
    path.write_text(f"{line}\n{line[:-3]}")
    (found,) = read_stamps(path).items()
    assert (found[0], found[1].committed_s, found[1].first_send_s) == (7, 1.5, 2.5)
