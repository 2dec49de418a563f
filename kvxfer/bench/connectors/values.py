"""What the words of options come to. Each raises UsageError, naming option and value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from kvxfer.bench.connectors.shapes import Ends
from kvxfer.cache.layout import KVCacheLayout
from kvxfer.errors import UsageError

T = TypeVar("T")

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"([0-9]{1,15})\s*(B|([KMG])(iB)?)?")
LARGEST = 1 << 46
FIXED = "fixed"


def size_of(option: str, text: str) -> int:
    """Bytes: a whole number, or one with KiB, MiB or GiB."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(option, text, "must be a size, such as 4096, 64KiB or 1MiB")
    size = int(found[1]) * _UNITS[found[3] or ""]
    if not 0 < size <= LARGEST:
        raise UsageError(option, text, "must be more than 0 and no more than 64 TiB")
    return size


def size_text(size_bytes: int) -> str:
    """As people write it, without a loss: 64KiB, 1MiB, 1000."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes and size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return str(size_bytes)


def count_of(option: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or int(text) < 1:
        raise UsageError(option, text, "must be a whole number from 1 on")
    return int(text)


def listed(option: str, text: str, read: Callable[[str, str], T]) -> list[T]:
    """Of a comma-separated list, each once."""
    found = [read(option, word.strip()) for word in text.split(",")]
    if len(set(found)) != len(found):
        raise UsageError(option, text, "names one twice")
    return found


def doubling(option: str, first: int, last: int) -> list[int]:
    if first > last:
        raise UsageError(option, last, f"is less than the start, {first}")
    found = [first]
    while found[-1] * 2 <= last:
        found.append(found[-1] * 2)
    return found


def one_of(*allowed: str) -> Callable[[str, str], str]:
    def read(option: str, text: str) -> str:
        for name in allowed:
            if text.upper() == name.upper():
                return name
        raise UsageError(option, text, f"must be of {', '.join(allowed)}")

    return read


def chunk_of(option: str, text: str) -> int:
    """Bytes; 0 for memory that is one plain allocation."""
    if text.lower() == FIXED:
        return 0
    size = size_of(option, text)
    if size < 1 << 16 or size & (size - 1):
        raise UsageError(option, text, "must be a power of two from 64KiB on, or fixed")
    return size


def ends_of(layouts: str, sizes: str) -> list[Ends]:
    """Each pair of layouts with each pair of tensor-parallel sizes."""

    def both(option: str, text: str) -> tuple[str, str]:
        source, _, target = text.partition(":")
        return source, target or source

    def layout_pair(option: str, text: str) -> tuple[KVCacheLayout, KVCacheLayout]:
        source, target = both(option, text)
        return KVCacheLayout.parse(option, source), KVCacheLayout.parse(option, target)

    def size_pair(option: str, text: str) -> tuple[int, int]:
        source, target = (count_of(option, one) for one in both(option, text))
        if max(source, target) % min(source, target):
            raise UsageError(option, text, "the one must be a multiple of the other")
        return source, target

    def every() -> Iterator[Ends]:
        for one in listed("layouts", layouts, layout_pair):
            for other in listed("tensor_parallel_sizes", sizes, size_pair):
                yield Ends(*one, *other)

    return list(every())
