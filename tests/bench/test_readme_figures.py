"""README.md's performance section says what the kept figures say, and cannot drift from them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvxfer.bench.readme import BEGIN, END, ReadmeOptions, read_all, run_readme
from kvxfer.bench.readme_tables import section_of
from kvxfer.bench.results import Result
from kvxfer.errors import UsageError

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "tests" / "bench" / "results"


@pytest.fixture
def copied(tmp_path: Path) -> ReadmeOptions:
    """A README and figures that may be changed."""
    shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    results = tmp_path / "results"
    results.mkdir()
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, results)
    return ReadmeOptions(check=True, readme=tmp_path / "README.md", results=results)


def change(path: Path, metric: str, **changes: Any) -> None:
    found = json.loads(path.read_text())
    (one,) = [figure for figure in found if figure["metric"] == metric]
    one.update(changes)
    path.write_text(json.dumps(found))


def test_the_readme_says_what_the_figures_say(capsys: pytest.CaptureFixture[str]) -> None:
    options = ReadmeOptions(check=True, readme=ROOT / "README.md", results=RESULTS)
    code = run_readme(options)
    assert code == 0, "run `kvxfer bench readme`:\n" + capsys.readouterr().out


def test_a_changed_figure_is_found_and_written(
    copied: ReadmeOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    before = copied.readme.read_text()
    metric = "peer on the host 1MiB: share of a contiguous copy"
    change(copied.results / "transfer-peer-host.json", metric, value=0.123, ok=False)
    assert run_readme(copied) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^\+.*0\.123 .*\(≥ 0\.9 \*\*missed\*\*\)", printed, re.MULTILINE)
    assert copied.readme.read_text() == before
    assert run_readme(ReadmeOptions(readme=copied.readme, results=copied.results)) == 0
    assert run_readme(copied) == 0
    after = copied.readme.read_text()
    assert after != before and "0.123" in after
    outside = [text.partition(BEGIN)[0] + text.partition(END)[2] for text in (before, after)]
    assert outside[0] == outside[1]


@pytest.mark.parametrize("what", ["bar", "spread_iqr", "commit", "command", "machine"])
def test_nothing_that_is_told_of_a_figure_can_drift(copied: ReadmeOptions, what: str) -> None:
    path = copied.results / "serve-overhead.json"
    value = 1.5 if what in ("bar", "spread_iqr") else "0ther"
    change(path, "serve: time to first byte, router alone, p50", **{what: value})
    assert run_readme(copied) == 1


def test_a_new_file_appears_by_itself(copied: ReadmeOptions) -> None:
    shutil.copy(RESULTS / "serve-overhead.json", copied.results / "bench-new.json")
    assert run_readme(copied) == 1
    assert run_readme(ReadmeOptions(readme=copied.readme, results=copied.results)) == 0
    assert "bench-new.json" in copied.readme.read_text()


def test_what_the_section_shows_must_be_there(copied: ReadmeOptions) -> None:
    path = copied.results / "transfer-peer-vs-nixl.json"
    text = path.read_text()
    path.write_text(text.replace(": ratio", ": quotient"))
    with pytest.raises(UsageError, match=r"transfer-peer-vs-nixl\.json.*no figure"):
        run_readme(copied)
    path.unlink()
    with pytest.raises(UsageError, match=r"transfer-peer-vs-nixl\.json.*is missing"):
        run_readme(copied)


def test_a_readme_without_its_markers_is_left_alone(copied: ReadmeOptions) -> None:
    text = copied.readme.read_text().replace(END, "")
    copied.readme.write_text(text)
    with pytest.raises(UsageError, match="end of figures"):
        run_readme(ReadmeOptions(readme=copied.readme, results=copied.results))
    assert copied.readme.read_text() == text
    with pytest.raises(UsageError, match=r"holds no \*\.json"):
        run_readme(ReadmeOptions(readme=ROOT / "README.md", results=copied.readme.parent))


def test_every_missed_bar_is_told() -> None:
    results = read_all(RESULTS)
    missed = sum(not one.ok for found in results.values() for one in found)
    assert missed > 0
    told = section_of(results).count("**missed**") - 1  # the introduction says what it means
    assert told == missed


@given(
    st.integers(1, 10**7),
    st.integers(-(10**5), 10**5),
    st.sampled_from((1, 3, 1000)),
    st.sampled_from(("higher", "lower")),
    st.sampled_from(("ms", "bytes")),
)
@example(81087, 80001, 1000, "lower", "ms")  # 81.0950 and 81.087: alike in three digits
def test_a_missed_bar_never_looks_reached(
    bar: int, difference: int, parts: int, better: Any, unit: str
) -> None:
    value, of = (bar + difference / 10**4) / parts, bar / parts
    ok = value >= of if better == "higher" else value <= of
    one = Result("m", value, unit, of, better, ok, 1, 0.0, "2 CPUs", {}, "c", "kvxfer bench m")
    text = section_of({"bench-m": [one]}, themes=()).partition("\n### ")[2]
    assert text.count("**missed**") == (0 if ok else 1)
    row = next(line for line in text.splitlines() if line.startswith("| m |"))
    _, _, shown, against, _ = row.split("|")
    if not ok:
        assert shown.strip().removesuffix(" ms") not in against.split()
