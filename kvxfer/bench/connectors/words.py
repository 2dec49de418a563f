"""How kinds and sizes are called where a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvxfer.bench.connectors.report import Kind

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_PREFIX = {"block_bytes": "blocks of ", "batch": "batch ", "chunk_bytes": "chunks of "}
_MEMORIES = ("initiator_memory", "target_memory")


def size_name(size_bytes: float) -> str:
    """64 KiB, 1.5 MiB: to a tenth, without a zero behind the point."""
    value, unit = float(size_bytes), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f}".removesuffix(".0") + f" {_UNITS[unit]}"


def digits_of(value: float, digits: int) -> str:
    """So many that count, but whole numbers are whole, with thousands apart."""
    if value == round(value) or abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def field_name(kind: Kind, field: str) -> str:
    """What a kind has in one of its fields, with the words that tell which it is."""
    value = getattr(kind, field)
    text = size_name(value) if field.endswith("_bytes") else str(value)
    return _PREFIX.get(field, "") + text


def split_names(kinds: Sequence[Kind]) -> tuple[str, list[str]]:
    """What all kinds have in common, and what is left to say of each: nothing is said twice.

    The connector and the operation are always said of each.
    """
    fields = [field.name for field in msgspec.structs.fields(Kind)]
    always = ("connector", "operation")
    shared = [
        field
        for field in fields
        if field not in always and len({getattr(kind, field) for kind in kinds}) == 1
    ]
    if not all(field in shared for field in _MEMORIES):
        shared = [field for field in shared if field not in _MEMORIES]
    common = _joined(kinds[0], shared) if kinds else ""
    left = [field for field in fields if field not in shared]
    return common, [_joined(kind, left) for kind in kinds]


def _joined(kind: Kind, fields: Sequence[str]) -> str:
    words = []
    for field in fields:
        if field == "target_memory":
            continue  # said with the initiator's
        is_memory = field == "initiator_memory"
        words.append(
            f"{kind.initiator_memory} to {kind.target_memory}"
            if is_memory
            else field_name(kind, field)
        )
    return ", ".join(words)
