"""What comparing two reports says, refuses and names; against a reference that counts by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bench_reports import kind, report, row

from kvxfer.bench.connectors.compare import compare_reports, comparison_of
from kvxfer.bench.connectors.report import Report, Row, Spread
from kvxfer.bench.noise import judge
from kvxfer.errors import UsageError

A, B = Path("a.json"), Path("b.json")
rates = st.integers(0, 400)
ranges = st.integers(0, 60)


def disjoint(a: int, a_iqr: int, b: int, b_iqr: int) -> bool:
    return a + a_iqr < b - b_iqr or b + b_iqr < a - a_iqr


def reference(a: int, a_iqr: int, b: int, b_iqr: int) -> str:
    """For what is better when it is higher, in whole numbers."""
    if not disjoint(a, a_iqr, b, b_iqr) or 20 * abs(a - b) <= max(a, b):
        return "same"
    return "gain" if b > a else "regression"


@given(rates, ranges, rates, ranges)
def test_a_change_must_exceed_both_ranges_and_five_percent(
    a: int, a_iqr: int, b: int, b_iqr: int
) -> None:
    before, after = Spread(a, a_iqr), Spread(b, b_iqr)
    expected = reference(a, a_iqr, b, b_iqr)
    assert judge(before, after, "higher") == expected
    turned = {"gain": "regression", "regression": "gain", "same": "same"}[expected]
    assert judge(after, before, "higher") == turned
    assert judge(before, after, "lower") == turned


def test_the_rule_s_edges() -> None:
    assert judge(Spread(100, 0), Spread(95, 0), "higher") == "same"
    assert judge(Spread(100, 0), Spread(94.9, 0), "higher") == "regression"
    assert judge(Spread(100, 10), Spread(80, 10), "higher") == "same"
    assert judge(Spread(100, 10), Spread(79.9, 10), "higher") == "regression"
    assert judge(Spread(0, 0), Spread(4, 0), "lower") == "regression"


KINDS = [kind(name, operation) for name in ("nixl", "peer") for operation in ("WRITE", "READ")]


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    chosen = draw(st.lists(st.sampled_from(KINDS), unique=True))
    return [
        row(of, draw(rates), draw(ranges), problem=draw(st.sampled_from(("", "", "peer ended"))))
        for of in chosen
    ]


@given(rows(), rows(), st.booleans())
def test_every_row_is_told_once_and_as_the_reference_says(
    before: list[Row], after: list[Row], is_complete: bool
) -> None:
    a, b = report(before), report(after, is_complete=is_complete)
    both = [(x, y) for x in before for y in after if x.kind == y.kind]
    if not both:
        with pytest.raises(UsageError, match="no kind in common"):
            comparison_of(A, a, B, b)
        return
    expected = []
    skipped = 0
    for x, y in both:
        if x.problem:
            skipped += 1
        elif y.problem:
            expected.append("broken")
        else:
            numbers = (x.gb_per_s.median, x.gb_per_s.iqr, y.gb_per_s.median, y.gb_per_s.iqr)
            expected.append(reference(*(int(number) for number in numbers)))
    found = comparison_of(A, a, B, b)
    assert [change.outcome for change in found.changes] == expected
    assert found.exit_code == (1 if {"regression", "broken"} & set(expected) else 0)
    assert len(found.only_a) == len(before) - len(both)
    assert len(found.only_b) == len(after) - len(both)
    assert len(found.warnings) == skipped + (not is_complete)


def test_a_change_that_the_share_does_not_show_is_the_machine_s() -> None:
    before = report([row(kind(), 4, 0.1, share=Spread(0.4, 0.01))])

    def outcome(rate: float, share: float, ceiling: str = "memcpy") -> str:
        after = row(kind(), rate, 0.1, share=Spread(share, 0.01), ceiling=ceiling)
        return comparison_of(A, before, B, report([after])).changes[0].outcome

    assert outcome(2, 0.4) == outcome(2, 0.6) == outcome(8, 0.4) == "machine"
    assert outcome(2, 0.2) == "regression"
    assert outcome(8, 0.6) == "gain"
    assert outcome(4, 0.2) == "same"
    assert outcome(2, 0.4, "socket") == "regression"


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("machine", {"machine": "4 CPUs, aarch64"}),
        ("settings.runs", {"settings": {"runs": 3, "warm_up": 2, "devices": "cpu,cpu"}}),
        ("settings.warm_up", {"settings": {"runs": 10, "devices": "cpu,cpu"}}),
        ("format", {"format": "kvxfer-bench-connectors/2"}),
    ],
)
def test_runs_that_measured_something_else_are_refused(field: str, change: dict[str, Any]) -> None:
    a, b = report(), report(**change)
    with pytest.raises(UsageError) as caught:
        comparison_of(A, a, B, b)
    assert caught.value.field == field
    name, _, key = field.partition(".")
    for one in (a, b):
        value = getattr(one, name)
        assert repr(value.get(key) if key else value) in str(caught.value)


def test_other_commits_and_versions_are_what_is_compared() -> None:
    b = report(commit="f" * 40, versions={"nixl": "2"}, command="kvxfer bench connectors -v")
    assert comparison_of(A, report(), B, b).exit_code == 0


def test_a_kind_that_is_there_twice_is_refused() -> None:
    twice = report([row(kind()), row(kind())])
    with pytest.raises(UsageError, match="one kind twice: nixl, WRITE"):
        comparison_of(A, report([row(kind())]), B, twice)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str, Report], Path]:
    def write(name: str, one: Report) -> Path:
        one.write(tmp_path / name)
        return tmp_path / name

    return write


def test_it_is_told_to_people_and_to_machines(
    written: Callable[[str, Report], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    changed = list(report().rows)
    changed[0] = msgspec.structs.replace(changed[0], gb_per_s=Spread(0.01), share=Spread(0.001))
    gone = changed.pop()
    a = written("a.json", report())
    b = written(
        "b.json", report(changed, is_complete=False, problems=["it was [bold]ended[/bold]"])
    )
    assert compare_reports(a, b, False) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "▼ regression" in printed
    assert f"{len(changed)} compared: 1 regressions, 0 gains" in printed
    assert "B is not complete, what both have is compared: it was [bold]ended[/bold]" in printed
    assert f"only in A: {gone.kind.connector}, {gone.kind.operation}, staged" in printed
    assert compare_reports(a, b, True) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["regressions"], found["gains"], len(found["only_a"])) == (1, 0, 1)
    assert found["changes"][0]["outcome"] == "regression"
    assert compare_reports(a, a, True) == 0
    capsys.readouterr()


def test_what_is_no_report_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"format": "kvxfer-bench-connectors/1"}')
    with pytest.raises(UsageError, match=r"wrong\.json.*no report"):
        compare_reports(wrong, wrong, False)
