"""What an endpoint knows of its peers, and they of it. Pure bookkeeping.

Two things that are easily mistaken for each other:
- a **remote** is a peer whose memory we may reach, since it told us how (`connect`);
- a **holder** is a peer that may reach ours, since we told it how (`describe`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvxfer.errors import WireError
from kvxfer.transfer.endpoint_messages import (
    Acknowledgement,
    Announcement,
    Growth,
    Revocation,
    check_regions,
)
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.regions import RegionSet


@dataclass(frozen=True, slots=True)
class Remote:
    """A peer as of its newest blob; a new one replaces it."""

    facts: Announcement
    regions: RegionSet
    epoch: int
    lanes: tuple[Lane, ...]
    """Those that may work and that we may start, best first."""

    @property
    def generation(self) -> int:
        return self.regions.generation

    @classmethod
    def of(cls, facts: Announcement, lanes: Iterable[Lane]) -> Remote:
        regions = RegionSet(tuple(facts.regions), facts.generation)
        return cls(facts, regions, facts.epoch, tuple(lanes))

    def check_again(self, peer: str, facts: Announcement) -> None:
        """Raise WireError where the same endpoint, announced again, has revoked what we know."""
        if facts.agent == self.facts.agent and facts.epoch != self.epoch:
            raise WireError(
                f"{peer}: announced as of revocation {facts.epoch}, we are at {self.epoch}: apply "
                f"its revocations in turn"
            )

    def grown(self, peer: str, growth: Growth) -> Remote | None:
        """None for old news. Raises WireError for a gap, RegionError for what overlaps."""
        self._check_agent(peer, growth.agent)
        if growth.generation <= self.generation and growth.epoch <= self.epoch:
            return None
        if growth.since > self.generation:
            raise WireError(
                f"{peer}: generations {self.generation + 1} to {growth.since} are missing"
            )
        if growth.epoch != self.epoch:
            raise WireError(
                f"{peer}: a revocation is missing: it is at {growth.epoch}, we are at {self.epoch}"
            )
        new = set(growth.regions).difference(self.regions.regions)
        together = sorted((*self.regions.regions, *new))
        regions = check_regions(self.facts.geometry, together, growth.generation)
        return Remote(self.facts, regions, self.epoch, self.lanes)

    def shrunk(self, peer: str, revocation: Revocation) -> Remote | None:
        """None for old news. It names all that is left, so no gap matters."""
        self._check_agent(peer, revocation.agent)
        if revocation.epoch <= self.epoch:
            return None
        if revocation.generation < self.generation:
            raise WireError(f"{peer}: generation {revocation.generation} after {self.generation}")
        regions = check_regions(self.facts.geometry, revocation.regions, revocation.generation)
        return Remote(self.facts, regions, revocation.epoch, self.lanes)

    def acknowledgement(self, *, has_left: bool = False) -> Acknowledgement:
        return Acknowledgement(
            agent=self.facts.agent,
            generation=self.generation,
            epoch=self.epoch,
            has_left=has_left,
        )

    def _check_agent(self, peer: str, agent: str) -> None:
        if agent != self.facts.agent:
            raise WireError(f"{peer}: is agent {self.facts.agent}, the blob is of agent {agent}")


class Holders:
    """Who may reach our memory, and how much of what became of it each has acknowledged."""

    def __init__(self) -> None:
        self._acked: dict[str, tuple[int, int]] = {}
        """(generation, epoch)."""

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._acked))

    def described_to(self, peer: str, generation: int, epoch: int) -> None:
        """It will know that much, whenever it connects; what it owed before it still owes."""
        self._acked.setdefault(peer, (generation, epoch))

    def acknowledged(self, peer: str, told: Acknowledgement, now: tuple[int, int]) -> None:
        """Raises WireError for what cannot be: the future, or a peer that was told nothing."""
        known = self._acked.get(peer)
        if known is None:
            raise WireError(f"{peer}: acknowledges, and nothing was described to it")
        if told.generation > now[0] or told.epoch > now[1]:
            raise WireError(f"{peer}: acknowledges {told.age}, we are at {now}")
        if told.has_left:
            del self._acked[peer]
        else:
            self._acked[peer] = max(known[0], told.generation), max(known[1], told.epoch)

    def forget(self, peer: str) -> None:
        self._acked.pop(peer, None)

    def acked(self) -> dict[str, tuple[int, int]]:
        """(generation, epoch) of ours that each peer has in force."""
        return dict(sorted(self._acked.items()))

    def oldest_generation(self, now: int) -> int:
        """The newest that all have acknowledged."""
        return min((generation for generation, _ in self._acked.values()), default=now)
