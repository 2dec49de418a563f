"""What endpoints tell each other, as opaque bytes for the engine to carry.

| blob            | made by                | taken by      | says |
| ---             | ---                    | ---           | --- |
| Announcement    | `describe`             | `connect`     | all that a peer needs to begin |
| Growth          | `update`               | `apply`       | regions that were added |
| Revocation      | `revoke`               | `apply`       | the regions that are left |
| Acknowledgement | `apply`, `disconnect`  | `acknowledge` | what of that is in force at the peer |

Each is msgpack behind a checked header (`envelope`): a damaged one is refused whole. That finds
damage, not malice: the engine's own channel says who may send.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from kvxfer.cache.layout import MAX_ADDRESSES, MAX_GROUPS, CacheGeometry
from kvxfer.errors import ConnectorError, HandshakeRejected, KvxferError, UsageError, WireError
from kvxfer.transfer.envelope import seal, unseal
from kvxfer.transfer.regions import Region, RegionSet

MAX_BLOB_BYTES = 64 << 20
MAX_HEADS = 1 << 20
"""More than any model has."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Lanes = Annotated[list[Annotated[str, msgspec.Meta(max_length=64)]], msgspec.Meta(max_length=64)]


@dataclass(frozen=True, slots=True)
class HeadShard:
    """Which KV heads of the model the cache of a tensor-parallel rank holds, in one group: its
    spec's num_kv_heads, from `first_head` on, of `total_heads`."""

    first_head: int
    total_heads: int

    def __post_init__(self) -> None:
        if not 1 <= self.total_heads <= MAX_HEADS:
            raise UsageError("total_heads", self.total_heads, f"must be 1 to {MAX_HEADS}")
        if not 0 <= self.first_head < self.total_heads:
            raise UsageError("first_head", self.first_head, f"is none of {self.total_heads} heads")


class _Blob(msgspec.Struct, tag=True, frozen=True, kw_only=True, forbid_unknown_fields=True):
    agent: _Name
    """Of the memory's owner: another one for each life of an endpoint."""
    generation: _Count
    """Additions of regions so far."""
    epoch: _Count
    """Revocations so far."""

    @property
    def age(self) -> tuple[int, int]:
        """What it is as of, to be compared part by part."""
        return self.generation, self.epoch


class Announcement(_Blob, frozen=True):
    name: _Name
    host: _Name
    device: _Name
    geometry: CacheGeometry
    shards: Annotated[list[HeadShard], msgspec.Meta(max_length=MAX_GROUPS)]
    """Group by group."""
    first_block: Annotated[int, msgspec.Meta(ge=0, le=1)]
    """The lowest block that KV may be in: 1 where block 0 is the null block."""
    base_address: Annotated[int, msgspec.Meta(ge=0, lt=MAX_ADDRESSES)]
    lanes: _Lanes
    regions: list[Region]
    description: bytes
    """The connectors', of their agents and of `regions`."""
    invitation: bytes
    """A one-time right to connect."""

    def __post_init__(self) -> None:
        check_shards(self.geometry, self.shards)
        check_regions(self.geometry, self.regions, self.generation)


class Growth(_Blob, frozen=True):
    since: _Count
    """`regions` are those added after this generation."""
    regions: list[Region]
    description: bytes


class Revocation(_Blob, frozen=True):
    regions: list[Region]
    """All that are left."""
    description: bytes


class Acknowledgement(_Blob, frozen=True):
    """Nothing of the sender uses, or ever will, what was revoked up to `epoch`."""

    has_left: bool = False
    """... or anything of the owner's memory."""


_AnyBlob = Announcement | Growth | Revocation | Acknowledgement
_decoder: msgspec.msgpack.Decoder[_AnyBlob] = msgspec.msgpack.Decoder(_AnyBlob)
_B = TypeVar("_B", bound=_AnyBlob)


def encode(blob: _AnyBlob) -> bytes:
    return seal(msgspec.msgpack.encode(blob))


def decode(data: bytes, kind: type[_B]) -> _B:
    """Raises WireError for bytes that are not exactly one blob of that kind."""
    blob = _decode(data)
    if not isinstance(blob, kind):
        raise WireError(f"blob is of kind {type(blob).__name__}, not {kind.__name__}")
    return blob


def decode_change(data: bytes) -> Growth | Revocation:
    """As `decode`, of what `apply` takes."""
    blob = _decode(data)
    if not isinstance(blob, Growth | Revocation):
        raise WireError(f"blob is of kind {type(blob).__name__}, not Growth or Revocation")
    return blob


def _decode(data: bytes) -> _AnyBlob:
    if len(data) > MAX_BLOB_BYTES:
        raise WireError(f"blob of {len(data)} bytes is larger than {MAX_BLOB_BYTES}")
    try:
        return _decoder.decode(unseal(data))
    except ConnectorError as error:
        raise WireError(str(error)) from error
    except (msgspec.MsgspecError, KvxferError, RecursionError, OverflowError) as error:
        raise WireError(f"blob does not decode: {error}") from error


def check_shards(geometry: CacheGeometry, shards: Sequence[HeadShard]) -> None:
    """Raise UsageError unless there is one for each group, and the group's heads fit into it."""
    if len(shards) != len(geometry.groups):
        raise UsageError("shards", len(shards), f"the cache has {len(geometry.groups)} groups")
    for spec, shard in zip(geometry.specs, shards, strict=True):
        if shard.first_head + spec.num_kv_heads > shard.total_heads:
            reason = f"{spec.num_kv_heads} heads from there on leave the {shard.total_heads}"
            raise UsageError("first_head", shard.first_head, reason)


def resolve_shards(geometry: CacheGeometry, shards: Sequence[HeadShard] | None) -> list[HeadShard]:
    """`shards`, checked; by default all heads of each group are there."""
    if shards is None:
        return [HeadShard(0, spec.num_kv_heads) for spec in geometry.specs]
    check_shards(geometry, shards)
    return list(shards)


def check_regions(geometry: CacheGeometry, regions: Sequence[Region], generation: int) -> RegionSet:
    """Raises RegionError or WireError unless they are disjoint, sorted and within the cache:
    offsets index int64 arrays later on."""
    checked = RegionSet(tuple(regions), generation)
    if regions and regions[-1].end > geometry.total_bytes:
        raise WireError(f"{regions[-1]} ends beyond the cache's {geometry.total_bytes} bytes")
    return checked


def check_same_kv(
    ours: CacheGeometry,
    shards: Sequence[HeadShard],
    theirs: CacheGeometry,
    their_shards: Sequence[HeadShard],
) -> None:
    """Raise HandshakeRejected, which names the field, where KV cannot flow between two caches:
    only layouts, capacities, block sizes (one divides the other) and held heads may differ."""
    if len(ours.groups) != len(theirs.groups):
        raise HandshakeRejected("groups", len(ours.groups), len(theirs.groups))
    for index, (spec, other) in enumerate(zip(ours.specs, theirs.specs, strict=True)):
        where = f" of group {index}" if len(ours.groups) > 1 else ""
        for name in (one.name for one in dataclasses.fields(spec)):
            mine, yours = getattr(spec, name), getattr(other, name)
            if name == "block_size":
                differs = max(mine, yours) % min(mine, yours) != 0
            else:
                differs = mine != yours and name not in ("num_kv_heads", "replicas")
            if differs:
                raise HandshakeRejected(f"{name}{where}", mine, yours)
        totals = shards[index].total_heads, their_shards[index].total_heads
        if totals[0] != totals[1]:
            raise HandshakeRejected(f"total_heads{where}", *totals)
