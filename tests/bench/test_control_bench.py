"""What the control plane costs, and a long life of it: the commands, run for a short while.

They and their workers are forked from a process that has imported what they need; the long soak is
started as a user starts it.
"""

import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
from support.commands import KVXFER, run

from kvxfer.bench import soak
from kvxfer.bench.control import ControlOptions, run_control
from kvxfer.bench.null_tokens import answer
from kvxfer.bench.soak import Soak, SoakOptions, run_soak
from kvxfer.bench.soak_cluster import Held
from kvxfer.bench.soak_figures import figures_of
from kvxfer.bench.thread_times import KINDS, thread_times
from kvxfer.errors import DeadlineExceeded, UsageError


def figures(path):
    return {record["metric"]: record for record in json.loads(path.read_text())}


def measure(found, server, *command):
    """Whatever its bars, which are for a quiet machine."""
    arguments = ("bench", *command, "--json", str(found))
    if server is None:
        done = run(*KVXFER, *arguments, timeout_s=170.0)
    else:
        done = server.run("kvxfer.cli", *arguments, timeout_s=170.0)
    assert done.code in (0, 1), done
    assert done.err == ""


def test_a_short_measurement_of_the_control_path(tmp_path, leaves_nothing_behind, fork_server):
    """Its bars are for a quiet machine: here only that it measures."""
    found = tmp_path / "cost.json"
    few = ("--rounds", "1", "--alone", "20", "--together", "200")
    measure(found, fork_server, "control", *few)
    recorded = figures(found)
    assert recorded["control: accepted to Done, p50"]["bar"] == 1.0
    assert recorded["control: hand-overs of a pair"]["bar"] == 2000.0
    cpu = {name: one["value"] for name, one in recorded.items() if "CPU" in name}
    assert all(record["value"] > 0 for name, record in recorded.items() if name not in cpu)
    for worker in ("prefill", "decode"):
        for when in ("one by one", "many at once"):
            name = f"control: CPU of {worker}, {when}"
            parts = [cpu[f"{name}: {kind}"] for kind in KINDS]
            assert 0 < cpu[name] == pytest.approx(sum(parts))


def busy_ns():
    """CPU time that this took the thread that runs it."""
    began = time.thread_time_ns()
    sum(range(3_000_000))
    return time.thread_time_ns() - began


def test_a_threads_time_is_counted_where_it_belongs():
    """The main thread is the control thread; any other of Python's is at work."""
    before = thread_times(os.getpid())
    took, is_over, is_seen = {}, threading.Event(), threading.Event()

    def work():
        took["work"] = busy_ns()
        is_over.set()
        is_seen.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert is_over.wait(10)
    took["control"] = busy_ns()
    after = thread_times(os.getpid())
    is_seen.set()
    thread.join()
    for kind, ns in took.items():
        assert after[kind] - before[kind] >= 0.5 * ns


@pytest.mark.parametrize(
    "kind, options",
    [
        (run_control, ControlOptions(rounds=0)),
        (run_soak, SoakOptions(hand_overs=9)),
        (run_soak, SoakOptions(connector=())),
    ],
)
def test_bad_options_are_refused_by_name(kind, options):
    with pytest.raises(UsageError, match=r"rounds|hand_overs|connector"):
        kind(options)


ALL = SoakOptions().connector


@pytest.mark.parametrize(
    "count, connectors, is_forked",
    [(400, ("peer,nixl",), True), pytest.param(2000, ALL, False, marks=pytest.mark.slow)],
)
def test_many_hand_overs_lose_nothing(
    tmp_path, leaves_nothing_behind, fork_server, count, connectors, is_forked
):
    """Real connectors, caches that shrink, grow and sleep."""
    found = tmp_path / "soak.json"
    told = [word for one in connectors for word in ("--connector", one)]
    server = fork_server if is_forked else None
    measure(found, server, "soak", "--hand-overs", str(count), *told)
    recorded = figures(found)
    for connector in connectors:
        check_soak(recorded, f"soak {connector}", count)


def check_soak(recorded, name, count):
    assert recorded[f"{name}: hand-overs"]["value"] == count
    assert recorded[f"{name}: sleeps of both workers"]["value"] >= 4
    missed = {metric for metric, record in recorded.items() if not record["ok"]}
    if count < 1000:  # how often caches shrink and grow is chance
        missed -= {metric for metric in missed if "shrinks" in metric or "growths" in metric}
    assert not {metric for metric in missed if metric.startswith(f"{name}: ")}
    for role in ("prefill", "decode"):
        grown = recorded[f"{name}: {role}, sockets, grown"]["value"]
        assert recorded[f"{name}: {role}, files, grown"]["value"] == grown
        assert grown <= 3 * recorded[f"{name}: sleeps of both workers"]["value"]


def held(number, **changes):
    what = dict.fromkeys(("rss_bytes", "files", "sockets", "threads"), number)
    return Held({role: {**what, **changes} for role in ("prefill", "decode", "router")})


def test_what_grows_is_seen_by_process_and_kind():
    found = Soak(done=100, shrinks=1, sleeps=3, growths={"prefill": 2, "decode": 1}, took_s=1.0)
    found.held = [held(5), held(5), held(5)]
    assert all(figure.ok for figure in figures_of("soak x", 100, found))
    found.held[2].by_process["decode"]["sockets"] += 1
    found.held[2].by_process["router"]["rss_bytes"] += 64 << 20
    missed = {figure.metric: figure.value for figure in figures_of("soak x", 100, found)
              if not figure.ok}  # fmt: skip
    assert missed == {
        "soak x: decode, sockets, grown": 1,
        "soak x: router, rss_bytes, grown": 64 << 20,
    }


class Pretended:
    """A cluster of which the test says what comes of a request."""

    def __init__(self, output=None, error="", answers=True):
        self.output, self.error, self.answers = output, error, answers

    def submit(self, prompt, num_new):
        output = answer(prompt, num_new) if self.output is None else self.output
        finished = SimpleNamespace(error=self.error) if self.answers else None
        return SimpleNamespace(tokens=prompt, output=output, finished=finished, sent_s=0.0)

    def poll(self): ...

    def shrink(self, chance):
        return True

    def sleep_and_look(self, first):
        return held(1)


@pytest.mark.parametrize(
    "cluster, wrong, failed",
    [(Pretended(), 0, 0), (Pretended(output=[1]), 400, 0), (Pretended(error="no"), 0, 400)],
)
def test_a_wrong_answer_is_told_from_a_right_one_and_from_none(cluster, wrong, failed):
    found = Soak()
    soak._run(cluster, SoakOptions(hand_overs=400), found)
    assert (found.done, found.wrong, len(found.failed)) == (400, wrong, failed)
    assert found.shrinks > 2
    assert found.sleeps > 2


def test_an_answer_that_never_comes_ends_the_soak():
    with pytest.raises(DeadlineExceeded):
        soak._run(Pretended(answers=False), SoakOptions(hand_overs=10), Soak())
