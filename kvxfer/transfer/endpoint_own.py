"""An endpoint's own half: its memory, what of it is registered, and who may reach it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from kvxfer.errors import CacheError, MemoryPinned, PlanError, RegionError, TransferError
from kvxfer.transfer.endpoint_memory import EndpointMemory
from kvxfer.transfer.endpoint_messages import (
    Acknowledgement,
    Announcement,
    Growth,
    HeadShard,
    Revocation,
)
from kvxfer.transfer.endpoint_peers import Holders
from kvxfer.transfer.endpoint_tickets import BlockSide
from kvxfer.transfer.lanes import LaneSide
from kvxfer.transfer.multi import MultiConnector
from kvxfer.transfer.regions import Region, RegionSet


class Registered:
    """What is registered of a memory, and which generation added it."""

    def __init__(self) -> None:
        self.regions = RegionSet()
        self._added: dict[Region, int] = {}

    def missing(self, regions: Sequence[Region]) -> tuple[Region, ...]:
        """Those of `regions` that are not registered."""
        return tuple(region for region in regions if region not in self._added)

    def add(self, regions: Sequence[Region]) -> None:
        self.regions = self.regions.add(regions)
        self._added |= dict.fromkeys(regions, self.regions.generation)

    def remove(self, regions: Sequence[Region]) -> None:
        self.regions = self.regions.remove(regions)
        for region in regions:
            del self._added[region]

    def since(self, generation: int) -> tuple[Region, ...]:
        """Those added after `generation`, and still there."""
        return tuple(region for region in self.regions.regions if self._added[region] > generation)


class OwnMemory:
    """`memory` as far as `connector` has registered it. Contracts as `Endpoint`'s methods'."""

    def __init__(
        self,
        name: str,
        memory: EndpointMemory,
        connector: MultiConnector,
        agent: str,
        shards: Sequence[HeadShard],
        lanes: LaneSide,
    ) -> None:
        self.name = name
        self.memory = memory
        self._connector = connector
        self._agent = agent
        self._shards = shards
        self._lanes = lanes
        self._registered = Registered()
        self._epoch = 0
        self._going: tuple[Region, ...] = ()
        """Revoked, and not released yet."""
        self._target: tuple[int, ...] = ()
        """What `revoke` was asked for, the newest time,"""
        self._revocation: Revocation | None = None
        """and what it said."""
        self.holders = Holders()

    @property
    def regions(self) -> RegionSet:
        return self._registered.regions

    @property
    def age(self) -> tuple[int, int]:
        """Generation and epoch."""
        return self.regions.generation, self._epoch

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each group that may be used now."""
        if not self._going:
            return self.memory.num_blocks
        return self.memory.blocks_after_shrink(self._target)

    def side(self, group: int) -> BlockSide:
        """Raises PlanError for a group that there is not."""
        groups = self.memory.geometry.groups
        if not 0 <= group < len(groups):
            raise PlanError(f"group: {group} is none of {len(groups)}")
        first_block = self.memory.first_block
        return BlockSide(self.name, groups[group], self.regions, self._shards[group], first_block)

    def describe(self, peer: str) -> Announcement:
        window = self.memory.window
        generation, epoch = self.age
        told = Announcement(
            agent=self._agent,
            generation=generation,
            epoch=epoch,
            name=self.name,
            host=self._lanes.host,
            device=window.device,
            geometry=self.memory.geometry,
            shards=list(self._shards),
            first_block=self.memory.first_block,
            base_address=window.base_address,
            lanes=list(map(str, self._lanes.lanes)),
            regions=list(self.regions.regions),
            description=self._connector.describe(self.regions.regions),
            invitation=self._connector.invite(),
        )
        self.holders.described_to(peer, generation, epoch)
        return told

    def register(self) -> None:
        self._check_not_revoking("register")
        new = self._registered.missing(self.memory.regions)
        if new:
            self._connector.register(new)
            self._registered.add(new)

    def grow(self, num_blocks: Sequence[int]) -> None:
        self._check_not_revoking("grow")
        self._check_groups(num_blocks)
        with ExitStack() as undo:
            extension = self.memory.extend(num_blocks)
            undo.callback(self.memory.retract, extension)
            self.register()
            undo.pop_all()

    def update(self) -> Growth | Revocation:
        if self._going and self._revocation is not None:
            return self._revocation
        since = self.holders.oldest_generation(self.regions.generation)
        regions = self._registered.since(since)
        return Growth(
            agent=self._agent,
            generation=self.regions.generation,
            epoch=self._epoch,
            since=since,
            regions=list(regions),
            description=self._connector.describe(regions),
        )

    def going(self, num_blocks: Sequence[int]) -> tuple[int, ...]:
        """The bound after `revoke(num_blocks)`. Raises CacheError where it would free nothing."""
        self._check_not_revoking("revoke")
        self._check_groups(num_blocks)
        if not self.memory.above(num_blocks):
            text = f"{list(self.memory.num_blocks)} are committed, in chunks that stay or go whole"
            raise CacheError(f"revoking down to {list(num_blocks)} blocks frees nothing: {text}")
        return self.memory.blocks_after_shrink(num_blocks)

    def revoke(self, num_blocks: Sequence[int]) -> Revocation:
        going = self.memory.above(num_blocks)
        gone = set(going).difference(self._registered.missing(going))
        left = self.regions.remove(gone).regions
        description = self._connector.revoke(left, self._epoch + 1)
        self._registered.remove(sorted(gone))
        self._going, self._target = going, tuple(num_blocks)
        self._epoch += 1
        self._revocation = Revocation(
            agent=self._agent,
            generation=self.regions.generation,
            epoch=self._epoch,
            regions=list(left),
            description=description,
        )
        return self._revocation

    def release(self) -> int:
        if not self._going:
            raise CacheError("nothing was revoked that could be released")
        owing = [peer for peer, (_, epoch) in self.holders.acked().items() if epoch < self._epoch]
        if owing:
            raise MemoryPinned(
                f"revoked memory stays: {', '.join(owing)} may still reach it, and has not "
                f"acknowledged"
            )
        going = self._going
        self._connector.deregister(going)
        self._connector.retire(())
        self._going = ()
        self.memory.shrink(self._target)
        return sum(region.size for region in going)

    def acknowledged(self, peer: str, told: Acknowledgement) -> None:
        if told.agent != self._agent:
            raise TransferError(f"{peer}: acknowledges what agent {told.agent} said, not us")
        self.holders.acknowledged(peer, told, self.age)

    def has_acknowledged(self, peer: str) -> bool:
        return self.holders.acked().get(peer, self.age) == self.age

    def check(self) -> None:
        """Conservation: raise RegionError unless exactly what is committed is registered, or is on
        its way out."""
        other = {*self.regions.regions, *self._going} ^ set(self.memory.regions)
        if other:
            raise RegionError(f"{min(other)} is registered or committed, and not both")

    def deregister(self) -> None:
        """All that is registered: the endpoint closes."""
        self._connector.deregister((*self.regions.regions, *self._going))
        self._registered, self._going = Registered(), ()

    def _check_not_revoking(self, what: str) -> None:
        if self._going:
            raise CacheError(f"cannot {what}: what was revoked is not released yet")

    def _check_groups(self, num_blocks: Sequence[int]) -> None:
        groups = len(self.memory.geometry.groups)
        if len(num_blocks) != groups:
            raise CacheError(f"{list(num_blocks)} blocks: the cache has {groups} groups")
