"""The checksum of KV, on the host and on a GPU, and of which requests it is taken.

What is summed up is defined in checksum_shard.py.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from kvxfer.errors import UsageError
from kvxfer.transfer.checksum_shard import (
    STEP,
    KVShard,
    Stretch,
    UInt64Array,
    checked_stretch,
    mix_in_place,
)

MASK: Final = (1 << 64) - 1
SCRATCH_WORDS: Final = 1 << 15
"""Words hashed at once on the host: what numpy holds twice stays within a core's cache."""


class DigestPolicy(enum.StrEnum):
    """Of which requests the KV is checked."""

    OFF = "off"
    SAMPLED = "sampled"
    ALWAYS = "always"


def should_check(policy: DigestPolicy, request_id: str, sample_every: int = 16) -> bool:
    """Whether this request is checked: of many, SAMPLED takes one in `sample_every`.

    Depends on the arguments alone, so two sides that agree on the other two agree on each request.
    """
    if sample_every < 1:
        raise UsageError("sample_every", sample_every, "must be at least 1")
    if policy is not DigestPolicy.SAMPLED:
        return policy is DigestPolicy.ALWAYS
    drawn = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"kvxfer.check").digest()
    return int.from_bytes(drawn, "little") % sample_every == 0


def combined(checksums: Iterable[int]) -> int:
    """The checksum of disjoint pieces together."""
    return sum(checksums) & MASK


class PendingChecksum:
    """A checksum under way on the stream that was current at its start."""

    def __init__(self, total: torch.Tensor, event: torch.cuda.Event | None, shard: KVShard) -> None:
        """`total`, int64 on the host, is right once `event` has happened (None: it is)."""
        self._total, self._event = total, event
        self._shard = shard  # its tables are in use until then

    @property
    def is_ready(self) -> bool:
        """Whether `result` would return at once."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def result(self) -> int:
        """In [0, 2^64). Waits for the GPU's work up to the start of this checksum, and for it."""
        if self._event is not None:
            self._event.synchronize()
        return int(self._total.item()) & MASK


def start_checksum(
    shard: KVShard,
    blocks: Sequence[int],
    tokens: range,
    layers: range | None = None,
    *,
    first_entry: int = 0,
) -> PendingChecksum:
    """Of `tokens`, positions in the request, in `layers` of the group (default: all).

    Token t lies in block `blocks[t // N - first_entry]`. On a GPU this launches work on the current
    stream, which the caller has ordered after whatever wrote the KV, and does not wait; `blocks`
    may change afterwards, the KV may not before `is_ready`. The first call for a shape compiles a
    kernel (seconds). On the host it is done on return.

    Raises PlanError for a range that is not plain or leaves the layers or the table, and for a
    block that is not there. The caller answers for blocks being committed.
    """
    stretch = checked_stretch(shard, blocks, tokens, layers, first_entry)
    if stretch is None:
        return PendingChecksum(torch.zeros((), dtype=torch.int64), None, shard)
    if shard.device.type == "cpu":
        total = _host_sum(shard, stretch)
        return PendingChecksum(torch.from_numpy(total.view(np.int64)), None, shard)
    from kvxfer.transfer.checksum_kernel import device_sum

    with torch.cuda.device(shard.device):
        total_there = device_sum(shard, stretch)
        total_here = torch.empty((), dtype=torch.int64, pin_memory=True)
        total_here.copy_(total_there, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
    return PendingChecksum(total_here, event, shard)


def kv_checksum(
    shard: KVShard,
    blocks: Sequence[int],
    tokens: range,
    layers: range | None = None,
    *,
    first_entry: int = 0,
) -> int:
    """`start_checksum`, waited for."""
    return start_checksum(shard, blocks, tokens, layers, first_entry=first_entry).result()


def _host_sum(shard: KVShard, stretch: Stretch) -> UInt64Array:
    """The sum as an array without axes."""
    words = [one.numpy() for one in shard.words]
    unsigned = np.dtype(f"u{words[0].itemsize}")
    columns = np.arange(words[0].shape[3], dtype=np.uint64) * np.uint64(STEP)
    total = np.zeros((), dtype=np.uint64)
    for ids, positions in _batches(shard, stretch):
        first, slots = int(positions[0, 0]) % shard.views[0].shape[2], positions.shape[1]
        # [blocks, 1, slots, 1] + [H, 1, 1]
        steps = (positions * np.uint64(STEP))[:, None, :, None]
        for layer in stretch.layers:
            rows = steps + shard.plane_keys[layer][:, None, None]
            mix_in_place(rows)
            values = rows + columns
            # Fancy indices last: numpy then copies what they name, not the whole cache.
            values ^= words[layer][:, :, first : first + slots].view(unsigned)[ids]
            mix_in_place(values)
            total += values.sum(dtype=np.uint64)
    return total


def _batches(
    shard: KVShard, stretch: Stretch
) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.int64]], UInt64Array]]:
    """Block ids [n] and the tokens' positions [n, slots], as many as scratch memory holds."""
    _, heads, size, width = shard.words[0].shape
    tokens, ids = stretch.tokens, np.asarray(stretch.ids, dtype=np.int64)
    origin = tokens.start // size
    most = max(1, SCRATCH_WORDS // (heads * size * width))
    at = tokens.start
    while at < tokens.stop:
        if at % size or at + size > tokens.stop:  # part of a block
            until, slots = min((at // size + 1) * size, tokens.stop), 0
            slots = until - at
        else:
            until, slots = min(at + most * size, tokens.stop // size * size), size
        positions = np.arange(at, until, dtype=np.uint64).reshape(-1, slots)
        entry = at // size - origin
        yield ids[entry : entry + len(positions)], positions
        at = until
