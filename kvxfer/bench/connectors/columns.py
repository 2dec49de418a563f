"""A row's columns: what the table shows, and the CSV file holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.bench.connectors.report import Row
from kvxfer.bench.connectors.values import FIXED, size_text

Value = str | int | float
_SIZES = ("block_bytes", "chunk_bytes")


@dataclass(frozen=True, slots=True)
class Column:
    key: str
    """In the CSV file."""
    title: str
    """In the table."""
    rank: int
    """A terminal that is too narrow goes without those of the highest numbers."""
    value: Callable[[Row], Value]
    text: Callable[[Row], str]
    is_number: bool = True

    def cell(self, row: Row) -> str:
        """A dash for what was not found: no run of it ended well."""
        is_found = row.runs or not self.is_number or self.key in ("batch", *_SIZES)
        return self.text(row) if is_found else "–"


def _number(
    key: str, title: str, rank: int, value: Callable[[Row], float], form: str = "{:,.0f}"
) -> Column:
    return Column(key, title, rank, value, lambda row: form.format(value(row)))


def _words(key: str, title: str, rank: int, value: Callable[[Row], str]) -> Column:
    return Column(key, title, rank, value, value, is_number=False)


def _size(key: str, title: str, rank: int, value: Callable[[Row], int]) -> Column:
    return Column(key, title, rank, value, lambda row: size_text(value(row)))


def lane_of(row: Row) -> str:
    """Connector and direction."""
    return f"{row.kind.connector} {'push' if row.kind.operation == 'WRITE' else 'pull'}"


def micros(value: float) -> str:
    """To three digits or whole: 8.31, 120, 15,300."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _micros(key: str, title: str, rank: int, value: Callable[[Row], float]) -> Column:
    return Column(key, title, rank, value, lambda row: micros(value(row)))


COLUMNS = (
    _words("lane", "lane", 0, lane_of),
    _words("connector", "connector", 30, lambda row: row.kind.connector),
    _words("operation", "op", 31, lambda row: row.kind.operation),
    _words("mode", "mode", 17, lambda row: row.kind.mode),
    _words("initiator_memory", "initiator", 18, lambda row: row.kind.initiator_memory),
    _words("target_memory", "target", 19, lambda row: row.kind.target_memory),
    _words("layouts", "layouts", 14, lambda row: row.kind.layouts),
    Column("chunk_bytes", "chunks", 16, lambda row: row.kind.chunk_bytes,
           lambda row: size_text(row.kind.chunk_bytes) if row.kind.chunk_bytes else FIXED),
    _size("block_bytes", "block", 1, lambda row: row.kind.block_bytes),
    _number("batch", "batch", 2, lambda row: row.kind.batch),
    _number("gb_per_s", "GB/s", 3, lambda row: row.gb_per_s.median, "{:.3g}"),
    _number("gb_per_s_iqr", "± IQR", 11, lambda row: row.gb_per_s.iqr, "{:.2g}"),
    _number("share", "share", 5, lambda row: row.share.median, "{:.0%}"),
    _number("share_iqr", "share's IQR", 32, lambda row: row.share.iqr, "{:.0%}"),
    _words("ceiling", "of", 15, lambda row: row.ceiling),
    _micros("latency_average_us", "average", 12, lambda row: row.latency_us.average),
    _micros("latency_p50_us", "p50", 4, lambda row: row.latency_us.p50),
    _micros("latency_p99_us", "p99", 6, lambda row: row.latency_us.p99),
    _micros("latency_p999_us", "p999", 13, lambda row: row.latency_us.p999),
    _micros("prepare_us", "prepare", 8, lambda row: row.prepare_us),
    _micros("post_us", "post", 9, lambda row: row.post_us),
    _micros("transfer_us", "transfer", 10, lambda row: row.transfer_us),
    _number("descriptors", "descr.", 20, lambda row: row.descriptors),
    _number("bytes_per_descriptor", "B/descr.", 21, lambda row: row.bytes_per_descriptor),
    _size("verified_bytes", "verified", 7, lambda row: row.verified_bytes),
    _number("runs", "runs", 22, lambda row: row.runs),
    _words("problem", "problem", 33, lambda row: row.problem),
)  # fmt: skip
HIDDEN = 30
"""Ranks from here on say again what another column, or a line below the table, says."""

LEGEND = (
    "block: what lies side by side at both ends. GB/s: median of the runs. share: of the machine's "
    "own copy of as many bytes, made just before.",
    "average to p999, prepare, post, transfer: µs. A run's time is post and transfer; prepare, the "
    "plan with its descriptors, comes before. With fewer than 100 runs p99, and with fewer than "
    "1,000 p999, is the longest.",
    "descr.: what the connector was given for a transfer: runs, or boxes of many runs where it "
    "copies by address.",
)


def fitting(rows: list[Row], width: int) -> list[Column]:
    """The columns, by importance, that a table of so many characters has room for. Pure."""
    left = [column for column in COLUMNS if column.rank < HIDDEN]
    while len(left) > 1 and table_width(left, rows) > width:
        left.remove(max(left, key=lambda column: column.rank))
    return left


def table_width(columns: list[Column], rows: list[Row]) -> int:
    """With a space on either side of each cell and a line between two."""
    return 1 + sum(
        3 + max([len(column.title), *(len(column.cell(row)) for row in rows)]) for column in columns
    )
