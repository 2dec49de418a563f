"""Reports of `kvxfer bench connectors`, made by hand: nobody measured these."""

from __future__ import annotations

from typing import Any

from kvxfer.bench.connectors.report import Ceiling, Kind, Latency, Report, Row, Spread

KIB = 1 << 10
SIZES = tuple(KIB * size for size in (4, 16, 64, 256, 1024, 2048))
_RATES = {"peer": 9.0, "nixl": 4.0, "mooncake": 1.8, "offload": 2.6, "staged": 3.1}


def kind(connector: str = "nixl", operation: str = "WRITE", **changes: Any) -> Kind:
    fields: dict[str, Any] = {
        "mode": "direct",
        "initiator_memory": "DRAM",
        "target_memory": "DRAM",
        "layouts": "LBHNC>LBHNC",
        "block_bytes": 64 * KIB,
        "batch": 64,
        "chunk_bytes": 64 << 20,
    }
    return Kind(connector, operation, **{**fields, **changes})


def row(of: Kind, rate: float = 4.0, iqr: float = 0.2, **changes: Any) -> Row:
    size_bytes = of.block_bytes * of.batch
    us = size_bytes / rate / 1e3 if rate else 0.0
    fields: dict[str, Any] = {
        "latency_us": Latency(1.05 * us, us, 1.6 * us, 2.1 * us),
        "prepare_us": 0.1 * us,
        "post_us": 0.05 * us,
        "transfer_us": 0.85 * us,
        "descriptors": of.batch,
        "bytes_per_descriptor": float(of.block_bytes),
        "ceiling": "memcpy",
        "share": Spread(rate / 12.5, iqr / 12.5),
        "verified_bytes": 10 * size_bytes,
        "runs": 10,
    }
    return Row(of, Spread(rate, iqr), **{**fields, **changes})


def report(rows: list[Row] | None = None, **changes: Any) -> Report:
    fields: dict[str, Any] = {
        "machine": "2 CPUs, x86_64",
        "versions": {"python": "3.11.2", "nixl": "1.5.1"},
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "command": "kvxfer bench connectors --runs 10",
        "settings": {"runs": 10, "warm_up": 2, "devices": "cpu,cpu"},
        "ceilings": [Ceiling("memcpy", Spread(12.5, 0.8)), Ceiling("socket", Spread(3.2, 0.3))],
        "is_complete": True,
        "problems": [],
    }
    return Report(**{**fields, "rows": _rows() if rows is None else rows, **changes})


def _rows() -> list[Row]:
    """Five lanes over six sizes, as a machine without GPUs might give."""
    rows = []
    for connector, top in _RATES.items():
        for operation in ("READ",) if connector == "peer" else ("WRITE", "READ"):
            for block_bytes in SIZES:
                rate = top * (0.7 if operation == "READ" else 1) * block_bytes
                rate /= block_bytes + 40 * KIB
                of = kind(
                    connector,
                    operation,
                    block_bytes=block_bytes,
                    mode="staged" if connector == "staged" else "direct",
                )
                ceiling = "socket" if connector == "mooncake" else "memcpy"
                rows.append(row(of, rate, 0.08 * rate, ceiling=ceiling))
    return rows
