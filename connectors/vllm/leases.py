"""A producer's leases: whose KV is kept, and for whom. Pure bookkeeping; no clock of its own.

| lease   | meaning                         | leaves by            | deadline |
| ---     | ---                             | ---                  | ---      |
| OFFERED | its blocks stay; fewer readers  | claims of all → READ | `timeout_s`: nobody else may |
|         | than there will be have claimed | deadline → READ      | claim it any more |
| READ    | those who claimed may read      | each done → FREED    | none: who is lost is done |
| FREED   | vLLM may have the blocks again  |                      | |

A claim may come before its offer does, which travels by the scheduler's next step: it waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from connectors.vllm.handover import Offer

EARLY_S = 10.0
"""How long a claim waits for its offer."""
MAX_EARLY = 4096


@dataclass(slots=True)
class Lease:
    offer: Offer
    deadline_s: float
    num_readers: int = 0
    """Expected; 0 before the first claim."""
    readers: set[str] = field(default_factory=set)
    """Peers that may be reading."""
    num_done: int = 0
    is_closed: bool = False
    """Nobody else may claim it."""

    @property
    def is_free(self) -> bool:
        all_came = self.is_closed or 0 < self.num_readers <= self.num_done + len(self.readers)
        return all_came and not self.readers


@dataclass(slots=True)
class _Early:
    num_readers: int
    deadline_s: float
    is_done: bool = False
    """It was given up before there was anything to read."""


class Leases:
    """Service thread only. `timeout_s`: how long a lease waits for its readers to claim it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._leases: dict[str, Lease] = {}
        self._early: dict[tuple[str, str], _Early] = {}
        """By peer and lease."""
        self._freed: set[str] = set()
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_readers(self) -> int:
        """That may be reading now."""
        return sum(len(lease.readers) for lease in self._leases.values())

    def offer(self, offer: Offer, now_s: float) -> list[str]:
        """Keep it; returns the peers that have claimed it already."""
        self._leases[offer.lease_id] = Lease(offer, now_s + self._timeout_s)
        ready = []
        for peer, lease_id in [key for key in self._early if key[1] == offer.lease_id]:
            early = self._early.pop((peer, lease_id))
            if self.claim(peer, lease_id, early.num_readers, now_s) is None:
                continue
            if early.is_done:
                self.done(peer, lease_id)
            else:
                ready.append(peer)
        return ready

    def claim(self, peer: str, lease_id: str, num_readers: int, now_s: float) -> Offer | None:
        """What `peer` may read now; None: nothing yet, or never, as `waits` says."""
        lease = self._leases.get(lease_id)
        if lease is None:
            if len(self._early) < MAX_EARLY:
                self._early[peer, lease_id] = _Early(num_readers, now_s + EARLY_S)
            return None
        if lease.is_closed or peer in lease.readers:
            return None
        lease.num_readers = lease.num_readers or num_readers
        if lease.num_done + len(lease.readers) >= lease.num_readers:
            return None
        lease.readers.add(peer)
        return lease.offer

    def waits(self, peer: str, lease_id: str) -> bool:
        """Whether a claim that got nothing waits for its offer."""
        return (peer, lease_id) in self._early

    def done(self, peer: str, lease_id: str) -> bool:
        """`peer` reads nothing of it any more; whether its right to was unbroken until now."""
        if (early := self._early.get((peer, lease_id))) is not None:
            early.is_done = True
            return False
        lease = self._leases.get(lease_id)
        if lease is None or peer not in lease.readers:
            return False
        lease.readers.remove(peer)
        lease.num_done += 1
        self._settle(lease)
        return True

    def lose(self, peer: str) -> int:
        """Break all that `peer` had; how many."""
        for key in [key for key in self._early if key[0] == peer]:
            del self._early[key]
        held = [lease_id for lease_id, lease in self._leases.items() if peer in lease.readers]
        for lease_id in held:
            self.done(peer, lease_id)
        return len(held)

    def expire(self, now_s: float) -> list[tuple[str, str]]:
        """Close what nobody has claimed in time; returns the claims, peer and lease, whose offer
        has not come."""
        for lease in list(self._leases.values()):
            if not lease.is_closed and now_s > lease.deadline_s:
                waits = (
                    lease.num_readers == 0
                    or lease.num_done + len(lease.readers) < lease.num_readers
                )
                lease.is_closed = True
                self.num_expired += waits
                self._settle(lease)
        late = {key: early for key, early in self._early.items() if now_s > early.deadline_s}
        for key in late:
            del self._early[key]
        return [key for key, early in late.items() if not early.is_done]

    def break_all(self) -> None:
        """The memory goes: no lease holds any more, and no Taken is confirmed."""
        self._early.clear()
        for lease in list(self._leases.values()):
            lease.readers.clear()
            lease.is_closed = True
            self._settle(lease)

    def take_freed(self) -> set[str]:
        """The requests whose blocks vLLM may have again, once each."""
        freed, self._freed = self._freed, set()
        return freed

    def _settle(self, lease: Lease) -> None:
        if lease.is_free:
            del self._leases[lease.offer.lease_id]
            self._freed.add(lease.offer.request_id)
