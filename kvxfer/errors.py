"""Every error that kvxfer raises on purpose.

KvxferError                    exit code 1
├── UsageError                 a value the user gave is wrong (exit code 2)
├── DriverError                a virtual-memory driver call failed
│   ├── OutOfMemory            ... for want of physical memory
│   └── DriverTooOld           ... or would: this version is known to be broken
├── CacheError                 the KV cache cannot do what was asked
│   ├── CapacityExceeded       more than the reservation can ever hold
│   ├── NoFreeBlocks           not now, maybe later
│   ├── BlocksInUse            not below these: somebody holds them, or may still touch them
│   ├── CacheSleeps            it has no memory now: wake it first
│   ├── CacheAwake             it has its memory already
│   └── MemoryPinned           a lost peer may still reach memory that was to be released
├── TransferError              KV could not be moved
│   ├── RegionError            bytes outside the registered ranges
│   ├── PlanError              two caches that no plan connects
│   └── ConnectorError         the transport under a connector failed
│       └── OutOfReach         ... or is not for peers that are there: others are
├── ControlError               the control plane
│   ├── WireError              bytes that are no message of ours
│   ├── HandshakeRejected      a peer that must not be talked to
│   └── DeadlineExceeded       a state outlived its deadline
├── ModelError                 the model cannot be run
│   ├── ModelOutOfMemory       a step's own allocations did not fit
│   ├── NotFinite              some of a step's sequences have no next token, the others do
│   └── UnsupportedModel       ... by design
├── RankFailed                 one rank of a tensor-parallel worker could not do its part
└── WorkerDied                 a worker process ended when it should not have

Foreign errors (OSError, CUDA codes, NIXL and ZMQ exceptions) become one of these in the module
that owns the foreign library, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class KvxferError(Exception):
    """Base of all; `str()` is one line that a user can act on."""

    exit_code = 1


class UsageError(KvxferError):
    """`field` holds `value`, which is refused because of `reason`."""

    exit_code = 2

    def __init__(self, field: str, value: object, reason: str) -> None:
        super().__init__(f"{field}: {value!r}: {reason}")
        self.field = field
        self.value = value
        self.reason = reason


class DriverError(KvxferError):
    """A call of the memory driver failed: which, with what code, and its text."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} failed with {code}: {text}")
        self.call = call
        self.code = code
        self.text = text


class OutOfMemory(DriverError):
    """`requested_bytes` of physical memory were asked for and `free_bytes` were there."""

    def __init__(self, call: str, code: int, requested_bytes: int, free_bytes: int) -> None:
        super().__init__(call, code, f"asked for {requested_bytes} bytes, {free_bytes} are free")
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes


class DriverTooOld(DriverError):
    """Version `found` of the driver is refused because of `reason`, which `needed` does not have.

    Known before anything is allocated, so that a caller can go on without growable memory.
    `call` and `code` are those of the question for the version.
    """

    def __init__(self, call: str, code: int, found: str, needed: str, reason: str) -> None:
        super().__init__(call, code, f"found version {found}, needed {needed} or later: {reason}")
        self.found = found
        self.needed = needed
        self.reason = reason


class CacheError(KvxferError):
    pass


class CapacityExceeded(CacheError):
    pass


class NoFreeBlocks(CacheError):
    pass


class BlocksInUse(CacheError):
    """The bound cannot be lowered to `num_blocks`: `used` and `quarantined` blocks lie above."""

    def __init__(self, num_blocks: int, used: int, quarantined: int, highest: int) -> None:
        super().__init__(
            f"cannot shrink to {num_blocks} blocks: above are {used} used and {quarantined} "
            f"quarantined ones, block {highest} the highest"
        )
        self.num_blocks = num_blocks
        self.used = used
        self.quarantined = quarantined
        self.highest = highest


class CacheSleeps(CacheError):
    pass


class CacheAwake(CacheError):
    pass


class MemoryPinned(CacheError):
    pass


class TransferError(KvxferError):
    pass


class RegionError(TransferError):
    pass


class PlanError(TransferError):
    pass


class ConnectorError(TransferError):
    pass


class OutOfReach(ConnectorError):
    pass


class ControlError(KvxferError):
    pass


class WireError(ControlError):
    pass


class HandshakeRejected(ControlError):
    """Hello and Welcome disagree in `field`: what we have and what the peer has."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"peer refused: {field} differs: ours {ours!r}, theirs {theirs!r}")
        self.field = field
        self.ours = ours
        self.theirs = theirs


class DeadlineExceeded(ControlError):
    pass


class ModelError(KvxferError):
    pass


class ModelOutOfMemory(ModelError):
    pass


class NotFinite(ModelError):
    """`problems` is why, for those of a step's sequences whose logits are not finite, by their
    place in it; `tokens` is what follows each of the others, whose KV is good (None for these)."""

    def __init__(self, problems: Mapping[int, str], tokens: Sequence[int | None]) -> None:
        super().__init__("; ".join(problems.values()))
        self.problems = dict(problems)
        self.tokens = list(tokens)


class UnsupportedModel(ModelError):
    pass


class RankFailed(KvxferError):
    """`rank` of `size` raised a `kind` of these; the ranks go on together."""

    def __init__(self, rank: int, size: int, kind: str, text: str) -> None:
        super().__init__(f"rank {rank} of {size}: {kind}: {text}")
        self.rank = rank
        self.size = size
        self.kind = kind


class WorkerDied(KvxferError):
    """`exit_code` is the worker's own where it ended by itself with one."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code
