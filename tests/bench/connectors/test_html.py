"""The report as a page: whole, harmless, readable, the same every time."""

from __future__ import annotations

import builtins
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.bench_reports import KIB, kind, report, row
from support.browser import WHY_NOT, browser

from kvxfer.bench.connectors.html import COLUMNS, page_of, write_html
from kvxfer.bench.connectors.panels import panels_of
from kvxfer.bench.connectors.report import Ceiling, Report, Spread
from kvxfer.errors import UsageError

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&$\\frac$ {{ 7*7 }}"
NO_PLOTS = "matplotlib is optional: kvxfer[bench]"


class Page(HTMLParser):
    """Its elements with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def refuse(name: str, *arguments: Any, **named: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return found(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", refuse)


def evil_report() -> Report:
    of = kind(EVIL, EVIL, mode=EVIL, layouts=EVIL, initiator_memory=EVIL)
    return Report(
        machine=EVIL,
        versions={EVIL: EVIL},
        commit=EVIL,
        command=EVIL,
        settings={EVIL: EVIL},
        ceilings=[Ceiling(EVIL, Spread(9.0, 1.0))],
        rows=[row(of, ceiling=EVIL, problem=EVIL), row(kind("nixl"), ceiling=EVIL)],
        is_complete=False,
        problems=[EVIL],
    )


def check_harmless(text: str) -> Page:
    """Nothing of the report became an element, an attribute or a script; nothing is loaded."""
    page = Page(text)
    assert len(page.all("script")) == 1
    assert not {"img", "iframe", "link", "object", "a", "base"} & {tag for tag, _ in page.elements}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
    assert "script-src 'sha256-" in str(page.all("meta"))
    addresses = set(re.findall(r"https?://[^\"'\s>]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    return page


def test_what_a_report_says_is_never_a_page_s_code(without_matplotlib: None) -> None:
    page = check_harmless(page_of(evil_report()))
    assert page.text.count(EVIL) >= 8


def test_nor_in_its_plots() -> None:
    pytest.importorskip("matplotlib", reason=NO_PLOTS)
    page = check_harmless(page_of(evil_report()))
    assert len(page.all("svg")) == 4


def test_without_matplotlib_all_is_there_but_the_plots(without_matplotlib: None) -> None:
    text = page_of(report())
    page = Page(text)
    assert page.text.count("no plots: matplotlib is missing: pip install 'kvxfer[bench]'") == 1
    assert not page.all("svg")
    assert text.count("<tr>") + text.count("<tr ") > len(report().rows)


def test_every_row_and_number_is_in_the_table(without_matplotlib: None) -> None:
    one = row(kind("nixl", block_bytes=4 * KIB), 3.456, 0.12, prepare_us=77.7)
    text = page_of(report([one]))
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", text.partition('id="rows"')[2])
    assert len(cells) == len(COLUMNS) + 2  # a title of a column without a button, and its cell
    for expected in ("nixl", "DRAM → DRAM", "4 KiB", "3.46 ± 0.12", "77.7", "memcpy", "10"):
        assert expected in cells
    for context in ("2 CPUs, x86_64", "0123456789abcdef", "--runs 10", "warm_up", "1.5.1"):
        assert context in text


def test_what_is_partial_is_marked_and_never_the_quickest(without_matplotlib: None) -> None:
    rows = [
        row(kind("peer"), 99.0, problem="the peer ended", runs=3),
        row(kind("nixl"), 4.0),
        row(kind("mooncake"), 0.0, problem="not opened", runs=0),
    ]
    text = page_of(report(rows, is_complete=False))
    assert text.count('<tr class="partial">') == 2
    assert "Not complete." in text
    assert "peer, WRITE: the peer ended" in text
    best = text.partition('class="best"')[2].partition("</table>")[0]
    assert "nixl WRITE" in best and "peer" not in best
    whole = page_of(report())
    assert "Not complete." not in whole and 'class="partial"' not in whole


def test_an_empty_report_is_a_page(without_matplotlib: None) -> None:
    assert "Nothing was measured." in page_of(report([], ceilings=[]))


def test_rows_are_drawn_with_those_that_they_may_be_compared_with() -> None:
    rows = [
        row(kind(name, block_bytes=size, layouts=layouts))
        for layouts in ("LBHNC>LBHNC", "LBNHC>BLHNC")
        for size in (64 * KIB, 4 * KIB)
        for name in ("nixl", "peer")
    ]
    found = panels_of(report([*rows, row(kind("mooncake"), runs=0)]))
    assert [panel.title.split(", ")[1] for panel in found] == ["LBHNC>LBHNC", "LBNHC>BLHNC"]
    for panel in found:
        assert (panel.axis, panel.ticks) == ("block_bytes", [4 * KIB, 64 * KIB])
        assert [line.name for line in panel.lines] == ["nixl WRITE", "peer WRITE"]
        assert [one.name for one in panel.ceilings] == ["memcpy", "socket"]
    (over_batches,) = panels_of(report([row(kind(batch=batch)) for batch in (64, 8)]))
    assert (over_batches.axis, over_batches.ticks) == ("batch", [8, 64])


def test_ceilings_of_sizes_are_one_line_where_their_rows_are() -> None:
    rows = [
        row(kind(block_bytes=4 * KIB, batch=8), ceiling="memcpy of 32KiB"),
        row(kind(block_bytes=64 * KIB, batch=8), ceiling="memcpy of 512KiB"),
        row(kind(initiator_memory="VRAM", target_memory="VRAM"), ceiling="device copy of 4MiB"),
    ]
    rates = {
        "memcpy of 512KiB": 9.0,
        "memcpy of 32KiB": 20.0,
        "memcpy of 1GiB": 8.0,  # no row here moves as much
        "socket of 32KiB": 1.0,  # no row's share is of it
        "socket of 4MiB": 3.0,
        "device copy of 4MiB": 390.0,
    }
    ceilings = [Ceiling(name, Spread(rate)) for name, rate in rates.items()]
    host, gpu = panels_of(report(rows, ceilings=ceilings))
    found = {one.name: [(x, rate.median) for x, rate in one.points] for one in host.ceilings}
    assert found == {"memcpy": [(4 * KIB, 20.0), (64 * KIB, 9.0)], "socket": [(4 * KIB, 1.0)]}
    found = {one.name: [(x, rate.median) for x, rate in one.points] for one in gpu.ceilings}
    assert found == {"socket": [(64 * KIB, 3.0)], "device copy": [(64 * KIB, 390.0)]}


def test_fixed_memory_is_on_no_scale_with_chunks(without_matplotlib: None) -> None:
    one = report([row(kind(chunk_bytes=size)) for size in (0, 64 << 20)])
    assert [panel.title.split(", ")[-1] for panel in panels_of(one)] == [
        "fixed memory",
        "chunks of 64 MiB",
    ]
    assert '<td class="number" data-order="0">fixed</td>' in page_of(one)


def test_plots_have_names_ids_of_their_own_and_the_page_s_colours() -> None:
    pytest.importorskip("matplotlib", reason=NO_PLOTS)
    names = ("peer", "nixl", "offload", "staged", "mooncake")
    one = report([row(kind(name), ceiling="socket") for name in names])
    text = page_of(one)
    assert text == page_of(one)
    page = Page(text)
    ids = [str(attributes["id"]) for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    figures = page.all("figure")
    assert [one["role"] for one in figures] == ["img", "img"]
    assert "ceiling socket: at most 3.2" in str(figures[0]["aria-label"])
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "var(--line-4)" in drawn and "ceiling: socket" in drawn
    assert not re.findall(r"(?:fill|stroke): #", drawn)


def test_a_report_is_written_as_a_whole(tmp_path: Path, without_matplotlib: None) -> None:
    path = tmp_path / "report.html"
    path.write_text("older")
    write_html(report(), path)
    assert path.read_text().startswith("<!DOCTYPE html>")
    assert list(tmp_path.iterdir()) == [path]
    directory = tmp_path / "directory.html"
    directory.mkdir()
    for wrong in (directory, tmp_path / "none" / "report.html"):
        with pytest.raises(UsageError, match="cannot be written"):
            write_html(report(), wrong)
    assert sorted(tmp_path.iterdir()) == [directory, path]


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
@pytest.mark.parametrize(("width", "is_dark"), [(1200, False), (1200, True), (390, False)])
def test_chromium_shows_it(tmp_path: Path, width: int, is_dark: bool) -> None:
    rows = [*report().rows, row(kind("peer", batch=8), 1.0, problem=EVIL)]
    write_html(msgspec.structs.replace(report(), rows=rows), tmp_path / "report.html")
    with browser(width, 800, is_dark=is_dark) as page:
        page.get((tmp_path / "report.html").as_uri())
        assert page.problems() == []
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.run("getComputedStyle(document.body).backgroundColor") == (
            "rgb(17, 22, 28)" if is_dark else "rgb(245, 246, 248)"
        )
        for turned in (1, -1):
            page.all("#rows button")[8].click()
            shown = "[...document.querySelectorAll('#rows tbody tr')].map(r => r.cells[8]"
            rates = page.run(f"{shown}.dataset.order)")
            found = [turned * float(rate) for rate in rates]
            assert found == sorted(found) and len(found) == len(rows)
        assert all(math.isfinite(float(rate)) for rate in rates)
        assert page.run("document.querySelector('#rows th[aria-sort]').textContent") == "GB/s"
        if page.all("svg"):
            assert all(svg.size["width"] > 300 for svg in page.all("svg"))
        assert page.problems() == []
