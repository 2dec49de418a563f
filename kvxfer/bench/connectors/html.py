"""The report as one page that needs nothing else: no network, no files beside it."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from kvxfer.bench.connectors.naming import digits_of, size_name, split_names
from kvxfer.bench.connectors.panels import Panel, panels_of
from kvxfer.bench.connectors.plots import Picture, connectors_of, draw_panel, why_no_plots
from kvxfer.bench.connectors.report import Report, Row, Spread
from kvxfer.errors import UsageError

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of the table: its text, and the number that it is sorted by (None: by its text)."""

    text: str
    order: float | None = None


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    is_number: bool
    help: str = ""


COLUMNS = (
    Column("connector", False),
    Column("operation", False, "WRITE is a push, READ a pull"),
    Column("mode", False),
    Column("memory", False, "the initiator's, and the target's"),
    Column("layouts", False, "the source's, and the destination's"),
    Column("block", True, "what lies side by side at both ends"),
    Column("batch", True, "blocks of a transfer"),
    Column("chunk", True, "of the committed memory around them; fixed: it cannot grow"),
    Column("GB/s", True, "median ± distance between quartiles"),
    Column("share", True, "of the ceiling, of neighbours in time"),
    Column("ceiling", False),
    Column("average µs", True, "latency of whole transfers"),
    Column("p50 µs", True),
    Column("p99 µs", True),
    Column("p999 µs", True),
    Column("prepare µs", True, "until the transport has its descriptors"),
    Column("post µs", True, "until it has begun"),
    Column("transfer µs", True, "from there until it ended"),
    Column("descriptors", True, "of a transfer"),
    Column("bytes/desc.", True),
    Column("verified", True, "bytes compared with what the source held"),
    Column("runs", True),
)


@dataclass(frozen=True, slots=True)
class Best:
    """The quickest whole row of a panel at one x."""

    x: str
    row: Row


@dataclass(frozen=True, slots=True)
class Drawn:
    """A panel on the page; no pictures where matplotlib is missing."""

    panel: Panel
    pictures: tuple[Picture, ...]
    best: list[Best]


def write_html(report: Report, path: Path) -> None:
    """In one go, as Report.write. Without matplotlib the page has no plots, and says so.

    Raises UsageError where it cannot be written.
    """
    page = page_of(report)
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(page, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise UsageError("html", str(path), f"cannot be written: {error.strerror}") from None


def page_of(report: Report) -> str:
    """All text of the report is escaped; the one script that may run is the page's own."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"digits": digits_of, "spread": _spread}
    script = (HERE / "page.js").read_text(encoding="utf-8")
    no_plots = why_no_plots()
    return environment.get_template("page.html").render(
        report=report,
        drawn=_drawn(report, with_plots=not no_plots),
        no_plots=no_plots,
        columns=COLUMNS,
        rows=[(row, _cells(row)) for row in report.rows],
        problems=_problems(report),
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_digest=_digest(script),
    )


def _drawn(report: Report, with_plots: bool) -> list[Drawn]:
    connectors = connectors_of(report.rows)
    return [
        Drawn(
            panel,
            draw_panel(panel, connectors, number) if with_plots else (),
            _best_of(panel),
        )
        for number, panel in enumerate(panels_of(report))
    ]


def _best_of(panel: Panel) -> list[Best]:
    found: list[Best] = []
    for x in panel.ticks:
        rows = [
            row
            for line in panel.lines
            for row in line.rows
            if panel.x_of(row) == x and not row.problem
        ]
        if rows:
            best = max(rows, key=lambda row: row.gb_per_s.median)
            found.append(Best(panel.tick_name(x), best))
    return found


def _problems(report: Report) -> list[str]:
    """The report's own, and those of its rows."""
    troubled = [row for row in report.rows if row.problem]
    _, names = split_names([row.kind for row in troubled])
    return [
        *report.problems,
        *(f"{name}: {row.problem}" for name, row in zip(names, troubled, strict=True)),
    ]


def _cells(row: Row) -> list[Cell]:
    kind, latency = row.kind, row.latency_us
    words = (
        kind.connector,
        kind.operation,
        kind.mode,
        f"{kind.initiator_memory} → {kind.target_memory}",
        kind.layouts.replace(">", " → "),
    )
    measured = (
        Cell(_spread(row.gb_per_s), row.gb_per_s.median),
        Cell(_spread(row.share), row.share.median) if row.ceiling else Cell("–", -1),
        Cell(row.ceiling or "–"),
        *(_number(value) for value in (latency.average, latency.p50, latency.p99, latency.p999)),
        *(_number(value) for value in (row.prepare_us, row.post_us, row.transfer_us)),
        _number(row.descriptors),
        _size(row.bytes_per_descriptor),
        _size(row.verified_bytes),
    )
    return [
        *(Cell(word) for word in words),
        _size(kind.block_bytes),
        _number(kind.batch),
        Cell(size_name(kind.chunk_bytes) if kind.chunk_bytes else "fixed", kind.chunk_bytes),
        *(measured if row.runs else (Cell("–", -1),) * len(measured)),
        _number(row.runs),
    ]


def _number(value: float) -> Cell:
    return Cell(digits_of(value, 3), value)


def _size(size_bytes: float) -> Cell:
    return Cell(size_name(size_bytes), size_bytes)


def _spread(spread: Spread) -> str:
    return digits_of(spread.median, 3) + (f" ± {digits_of(spread.iqr, 2)}" if spread.iqr else "")


def _digest(script: str) -> str:
    """As a policy for a page's contents names the scripts that it allows."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
