"""What a connector may reach at a peer: how it is told, learnt, and checked before a transfer.

Transports differ in how they refuse a wrong range (NIXL names neither the run nor the side), so
every connector checks a plan here first, against the regions both sides have announced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from kvxfer.errors import ConnectorError, RegionError
from kvxfer.memory.limits import host_identity
from kvxfer.transfer.boxes import Box
from kvxfer.transfer.connector import Direction, Where
from kvxfer.transfer.coverage import crossed_edges, first_overlap
from kvxfer.transfer.envelope import seal, unseal
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Int64Array, Region, RegionSet
from kvxfer.transfer.runs import overlap_of

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Int64 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """An agent, some of its regions, and whatever its transport needs to reach them."""

    agent: _Name
    device: _Name
    """The MemoryWindow's, as the agent's own process numbers it."""
    regions: list[tuple[_Int64, _Int64]]
    """(offset, size) pairs."""
    transport: bytes = b""
    host: Annotated[str, msgspec.Meta(max_length=256)] = ""
    """`kvxfer.memory.limits.host_identity` of where the agent runs; '' where that is not told."""

    def to_bytes(self) -> bytes:
        return seal(msgspec.msgpack.encode(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Description:
        """Raises ConnectorError unless `data` is exactly what `to_bytes` made."""
        payload = unseal(data)
        try:
            return msgspec.msgpack.decode(payload, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConnectorError(f"description does not decode: {error}") from error


@dataclass(frozen=True, slots=True)
class RemotePeer:
    """A peer as far as it was described to us."""

    agent: str
    device: str
    base_address: int
    regions: RegionSet
    host: str = ""
    """As in its description."""

    @property
    def where(self) -> Where:
        return Where.HOST if self.host == host_identity() else Where.NETWORK


def learn(
    peers: Mapping[str, RemotePeer], own_agent: str, peer: str, base_address: int, told: Description
) -> RemotePeer:
    """`peer` after `told`: its agent with more regions, or a new agent with just these.

    Pure. Raises ConnectorError when the description contradicts what is known.
    """
    if told.agent == own_agent:
        raise ConnectorError(f"peer {peer} has our own agent name {own_agent}")
    for name, other in peers.items():
        if other.agent == told.agent and name != peer:
            raise ConnectorError(f"agent {told.agent} of peer {peer} is already peer {name}")
    known = peers.get(peer)
    if known is None or known.agent != told.agent:
        known = RemotePeer(told.agent, told.device, base_address, RegionSet(), told.host)
    if (known.base_address, known.device) != (base_address, told.device):
        raise ConnectorError(
            f"agent {told.agent} of peer {peer} moved from {known.base_address:#x} on "
            f"{known.device} to {base_address:#x} on {told.device}"
        )
    try:
        new = {Region(offset, size) for offset, size in told.regions}
        regions = known.regions.add(new.difference(known.regions.regions))
    except RegionError as error:
        raise ConnectorError(f"description of peer {peer}: {error}") from error
    return RemotePeer(told.agent, told.device, base_address, regions, known.host)


def extend(registered: RegionSet, regions: Iterable[Region], size_bytes: int) -> RegionSet:
    """`registered` and `regions`, all within [0, size_bytes) and disjoint; else ConnectorError."""
    try:
        extended = registered.add(regions)
    except RegionError as error:
        raise ConnectorError(f"cannot register: {error}") from error
    if extended.regions and extended.regions[-1].end > size_bytes:
        raise ConnectorError(f"{extended.regions[-1]} ends beyond the {size_bytes} bytes reserved")
    return extended


def check_registered(registered: RegionSet, regions: Iterable[Region]) -> None:
    """Raise ConnectorError unless each of `regions` was registered, and just so."""
    unknown = sorted(set(regions).difference(registered.regions))
    if unknown:
        raise ConnectorError(f"{unknown[0]} is not registered ({len(unknown)} such)")


def shrink(registered: RegionSet, regions: Iterable[Region]) -> RegionSet:
    """`registered` without `regions`, which must all be in it (else ConnectorError)."""
    try:
        return registered.remove(regions)
    except RegionError as error:
        raise ConnectorError(str(error)) from error


def check_plan(
    plan: TransferPlan, direction: Direction, local: RegionSet, remote: RegionSet
) -> None:
    """Raise ConnectorError unless all of `plan` lies in the regions, each run in one on either
    side, and no destination byte comes twice.

    A planner has seen to all that; its word counts where the regions that it saw are still there.
    For other plans it costs what the pages of their boxes cost: runs are looked at only where a
    region begins that the plan does not know of.
    """
    push = direction is Direction.PUSH
    source, destination = (local, remote) if push else (remote, local)
    if (
        plan.seen is not None
        and source.includes(plan.seen[0])
        and destination.includes(plan.seen[1])
    ):
        return
    sides = [("source", source, plan.src_edges), ("destination", destination, plan.dst_edges)]
    _check_sizes(plan)
    try:
        for what, regions, edges in sides:
            _check_side(plan, what, regions, edges)
    except RegionError as error:
        raise ConnectorError(str(error)) from error
    if plan.given is None:
        overlap = first_overlap([box.dst_stretches() for box in plan.boxes])
    else:
        overlap = overlap_of(plan.given)
    if overlap is not None:
        raise ConnectorError(f"overlapping descriptors: destination offset {overlap} comes twice")


def _check_sizes(plan: TransferPlan) -> None:
    smallest = min((box.run_bytes for box in plan.boxes), default=1)
    if smallest <= 0:
        raise ConnectorError(f"plan has a run of {smallest} bytes")


def _check_side(plan: TransferPlan, what: str, regions: RegionSet, edges: Int64Array) -> None:
    if plan.given is None:
        of = Box.src_stretches if what == "source" else Box.dst_stretches
        crossed = crossed_edges([of(box) for box in plan.boxes], regions, what)
        if np.isin(crossed, edges).all():
            return
    offsets = plan.src_offsets if what == "source" else plan.dst_offsets
    regions.check_covers(offsets, plan.sizes, what)
