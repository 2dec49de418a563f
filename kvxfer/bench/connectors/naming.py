"""How kinds, sizes and numbers are written where a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvxfer.bench.connectors.report import Kind

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_PREFIX = {"block_bytes": "blocks of ", "batch": "batch ", "chunk_bytes": "chunks of "}
_MEMORIES = ("initiator_memory", "target_memory")
_ALWAYS = ("connector", "operation")
FIELDS = tuple(field.name for field in msgspec.structs.fields(Kind))


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
    """What it has there, with the words that tell which field it is."""
    value = getattr(kind, field)
    if field == "chunk_bytes" and not value:
        return "fixed memory"
    text = size_name(value) if field.endswith("_bytes") else str(value)
    return _PREFIX.get(field, "") + text


def split_names(
    kinds: Sequence[Kind], fields: Sequence[str] | None = None
) -> tuple[str, list[str]]:
    """What all kinds have in common, and what is left to say of each: nothing is said twice.

    `fields` is what is in common; without it, it is found out. The connector and the operation are
    always said of each, and the two memories together.
    """
    shared = list(fields) if fields is not None else _shared(kinds)
    left = [field for field in FIELDS if field not in shared]
    common = _joined(kinds[0], shared) if kinds else ""
    return common, [_joined(kind, left) for kind in kinds]


def _shared(kinds: Sequence[Kind]) -> list[str]:
    same = [name for name in FIELDS if len({getattr(kind, name) for kind in kinds}) == 1]
    left_out = (*_ALWAYS, *(() if all(name in same for name in _MEMORIES) else _MEMORIES))
    return [name for name in same if name not in left_out]


def _joined(kind: Kind, fields: Sequence[str]) -> str:
    words = []
    for field in fields:
        value = getattr(kind, field)
        if field == "initiator_memory":
            words.append(f"{value} to {kind.target_memory}")
        elif field != "target_memory":
            words.append(field_name(kind, field))
    return ", ".join(words)
