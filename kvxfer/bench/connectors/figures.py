"""A report's rows as figures, as the other benches keep them."""

from __future__ import annotations

from collections.abc import Iterator

from kvxfer.bench.connectors.report import Kind, Report, Row
from kvxfer.bench.connectors.values import size_text
from kvxfer.bench.report import Figure


def figures_of(report: Report, bar: float) -> list[Figure]:
    """Of each row that was measured as a whole its share of the machine's own copy and its rate.
    `bar`: that the shares are to reach; 0: none."""
    return [one for row in report.rows if not row.problem for one in _figures(row, bar)]


def _figures(row: Row, bar: float) -> Iterator[Figure]:
    name, share, rate = _metric(row.kind), row.share, row.gb_per_s
    copy = row.ceiling.partition(" of ")[0]
    metric = f"{name}: share of {copy}"
    yield Figure(metric, share.median, "×", bar or None, "higher", row.runs, share.iqr)
    yield Figure(f"{name}: rate", rate.median, "GB/s", None, "higher", row.runs, rate.iqr)


def _metric(kind: Kind) -> str:
    chunks = f"chunks of {size_text(kind.chunk_bytes)}" if kind.chunk_bytes else "fixed memory"
    return (
        f"{kind.connector} {kind.operation}, {kind.initiator_memory} to {kind.target_memory}, "
        f"{kind.layouts}, {chunks}, {kind.batch} × {size_text(kind.block_bytes)}"
    )
