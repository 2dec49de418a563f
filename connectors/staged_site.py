"""This end of the staged way: its cache, its ring, what copies between the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from connectors.peer_copy import Copier
from connectors.staged_agent import StagedAgent
from connectors.staged_cover import Cover
from connectors.staged_link import Clock
from connectors.staged_messages import Ring
from connectors.staging_plan import Nest, gather, scatter
from kvxfer.errors import ConnectorError, RegionError
from kvxfer.transfer.connector import MemoryWindow
from kvxfer.transfer.coverage import crossed_edges
from kvxfer.transfer.regions import RegionSet


@dataclass(slots=True)
class Site:
    """`regions` is replaced as they come and go."""

    memory: MemoryWindow
    ring: Ring
    agent: StagedAgent
    copier: Copier
    clock: Clock
    regions: RegionSet
    is_closing: bool = False
    _cover: Cover = field(default_factory=lambda: Cover(RegionSet()))
    """Of `regions` as they were when bytes were last looked for in them."""

    def gather(self, nests: Sequence[Nest], slot: int, known: RegionSet | None) -> Any:
        """Start copying from the cache into an outgoing slot. Raises ConnectorError where bytes
        are not registered, unless they are `known` to be."""
        self._check(nests, "source", known)
        to = self.ring.base_address + self.ring.outgoing(slot)
        return self.copier.start(gather(nests), self.memory.base_address, to, self.copier.place)

    def scatter(self, nests: Sequence[Nest], slot: int, known: RegionSet | None) -> Any:
        """Start copying from an incoming slot into the cache; errors as above."""
        self._check(nests, "destination", known)
        origin = self.ring.base_address + self.ring.incoming(slot)
        boxes = scatter(nests)
        return self.copier.start(boxes, origin, self.memory.base_address, self.copier.place)

    def _check(self, nests: Sequence[Nest], what: str, known: RegionSet | None) -> None:
        if known is self.regions:
            return
        if self._cover.regions is not self.regions:
            self._cover = Cover(self.regions)
        unsure = [nest.stretches() for nest in nests if not self._cover.holds(nest)]
        if not unsure:
            return
        try:
            crossed_edges(unsure, self.regions, what)
        except RegionError as error:
            raise ConnectorError(str(error)) from error
