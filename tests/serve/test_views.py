"""Where a worker's clock is, which answers count, and what is kept of prompts."""

import pytest
from support.plausible import example

from kvxfer.control.router_messages import Generate
from kvxfer.control.view_messages import View
from kvxfer.serve import views
from kvxfer.serve.completion import Completion
from kvxfer.serve.lives import MAX_LIVES, Life, Lives
from kvxfer.serve.views import DRIFT_NS, PATIENCE_NS, ViewTable

AHEAD_NS = 5_000_000_000
"""The worker's clock, of ours."""


@pytest.fixture
def clock(monkeypatch):
    """Ours, as a list of one number."""
    now = [1_000_000_000]
    monkeypatch.setattr(views, "now_ns", lambda: now[0])
    return now


def answer(query, worker_ns):
    return example(View, asked_ns=query.asked_ns, now_ns=worker_ns)


def ask(table, clock, there_ns, back_ns):
    """A question and its answer, which take so long."""
    query = table.query("w")
    clock[0] += there_ns
    view = answer(query, clock[0] + AHEAD_NS)
    clock[0] += back_ns
    table.took("w", view)
    return view


def test_a_worker_s_times_are_placed_within_half_of_the_shortest_way(clock):
    table = ViewTable()
    ask(table, clock, 40_000_000, 0)
    assert table.get("w").place_s(AHEAD_NS + 10**9) == pytest.approx(1.0, abs=0.0201)
    ask(table, clock, 1_000_000, 1_000_000)
    assert table.get("w").place_s(AHEAD_NS + 10**9) == pytest.approx(1.0, abs=1e-9)
    ask(table, clock, 40_000_000, 0)
    held = table.get("w")
    assert held.place_s(AHEAD_NS + 10**9) == pytest.approx(1.0, abs=1e-9), "no worse than before"
    clock[0] += DRIFT_NS
    ask(table, clock, 10_000_000, 0)
    assert table.get("w").place_s(AHEAD_NS + 10**9) == pytest.approx(1.0, abs=0.0051)


def test_one_question_at_a_time_until_patience_ends(clock):
    table = ViewTable()
    first = table.query("w")
    assert table.query("w") is None and table.query("other") is not None
    clock[0] += PATIENCE_NS
    second = table.query("w")
    table.took("w", answer(first, 1))
    assert table.get("w") is None, "an answer to what is not waited for any more"
    table.took("w", answer(second, 1))
    assert table.get("w").view is not None and table.query("w") is not None


def test_what_nobody_asked_for_is_dropped(clock):
    table = ViewTable()
    table.took("w", example(View))
    ask(table, clock, 1, 1)
    table.forget("w")
    table.took("w", example(View))
    assert table.get("w") is None


def prompt(name):
    generate = example(Generate, request_id=name)
    return Completion(name, generate.tokens, None, 1.0, generate, 2.0)


def test_prompts_that_ended_are_kept_as_a_few_numbers_and_no_more_than_that():
    lives, first = Lives(), prompt("a")
    lives.add(first)
    assert lives.look()[0].ended_s is None and lives.look()[0].reason == ""
    first.fail("gone")
    lives.add(prompt("b"))
    assert first not in lives._newest
    told = lives.look()
    assert [one.request_id for one in told] == ["a", "b"]
    assert told[0].reason == "error" and told[0].ended_s == first.ended_s > 0
    for number in range(2 * MAX_LIVES):
        lives.add(prompt(str(number)))
    assert len(lives.look()) == MAX_LIVES
    assert all(isinstance(one, Life) for one in lives.look())
