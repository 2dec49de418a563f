"""Links that KV moves over: out of a prefill worker, into a decode worker, and what all share.

A transfer has both ends to itself while it lasts (first come, first served): of two that share an
end the second begins when the first is over. That takes as long for both together as if they had
shared the rate, and the first is there sooner. All together go at no more than the fabric's rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.bench.simulate.costs import Costs


@dataclass(eq=False, slots=True)
class Link:
    """One end's, or the fabric's."""

    free_s: float = 0.0
    busy_s: float = 0.0


class Links:
    """Of a cluster. `shared_by` workers of a role, next to each other by place, are on one link."""

    def __init__(
        self, num_prefill: int, num_decode: int, shared_by: int, fabric: float, costs: Costs
    ) -> None:
        """`fabric`: bytes a second of all links together; 0: no bound."""
        self._costs = costs
        self._shared_by = shared_by
        self._fabric_rate = fabric
        self.egress = [Link() for _ in range(-(-num_prefill // shared_by))]
        self.ingress = [Link() for _ in range(-(-num_decode // shared_by))]
        self.fabric = Link()
        self.num_bytes = 0.0
        self.waited_s = 0.0
        """Of all transfers, for others to end."""

    def move(self, now_s: float, prefill: int, decode: int, num_bytes: float) -> float:
        """A transfer is asked for now, from and to workers by place; when it ends."""
        out = self.egress[prefill // self._shared_by]
        into = self.ingress[decode // self._shared_by]
        start_s = max(now_s, out.free_s, into.free_s)
        end_s = start_s + self._costs.transfer_s(num_bytes)
        if self._fabric_rate:
            takes_s = num_bytes / self._fabric_rate
            self.fabric.free_s = max(self.fabric.free_s, start_s) + takes_s
            self.fabric.busy_s += takes_s
            end_s = max(end_s, self.fabric.free_s)
        for link in (out, into):
            link.free_s = end_s
            link.busy_s += end_s - start_s
        self.num_bytes += num_bytes
        self.waited_s += start_s - now_s
        return end_s
