"""Lanes: which connector moves KV between two workers, and who starts the transfers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvxfer.errors import HandshakeRejected, WireError
from kvxfer.transfer.connector import Connector, Direction, Where

AUTO = "auto"
LANES = (AUTO, *Direction)
"""What a user may ask for."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A connector and a direction; with a pair of workers, a way for KV to flow."""

    connector: str
    direction: Direction

    def __str__(self) -> str:
        return f"{self.connector}/{self.direction}"

    @classmethod
    def parse(cls, text: str) -> Lane:
        """What `str` made. Raises WireError for anything else."""
        connector, _, direction = text.partition("/")
        if not connector or direction not in list(Direction):
            raise WireError(f"{text!r} is no lane")
        return cls(connector, Direction(direction))


@dataclass(frozen=True, slots=True)
class LaneSide:
    """What a worker brings to the choice of a lane."""

    lanes: tuple[Lane, ...]
    host: str
    """Identity of the running kernel: the same in all containers of a host."""
    device: str
    local: frozenset[Lane] = frozenset()
    """Those of `lanes` that are for workers of one host only."""


def offered(connectors: Mapping[str, type[Connector] | Connector], asked: str) -> list[Lane]:
    """Every lane of `connectors`, of which the user `asked` for a direction, or for auto."""
    return [
        Lane(name, direction)
        for name, connector in connectors.items()
        for direction in Direction
        if direction in connector.directions and asked in (AUTO, direction)
    ]


def served(connectors: Mapping[str, Connector], lanes: Sequence[Lane], where: Where) -> list[Lane]:
    """Those of `lanes` by which nothing is read that its owner would have to send."""
    return [
        lane
        for lane in lanes
        if lane.direction is Direction.PUSH or where in connectors[lane.connector].reads_from
    ]


def candidates(ours: LaneSide, theirs: LaneSide) -> list[Lane]:
    """The lanes that both offer and that may work, best first as far as that is known beforehand;
    both sides get the same answer. Raises HandshakeRejected where there is none.

    Measured: mapping a peer's pages (`peer`) is the quickest where both are on one host. NIXL
    pulls growable GPU memory of one host at 250–300 GB/s and pushes it at 0.5; on the host both
    are cross-memory copies, and over TCP pushing is 2–4 times faster.
    """
    common = [lane for lane in ours.lanes if lane in theirs.lanes]
    same_host = ours.host == theirs.host
    local = ours.local | theirs.local
    usable = [
        lane for lane in common if same_host or not (lane.connector in _ONE_HOST or lane in local)
    ]
    if not usable:
        _reject(ours.lanes, theirs.lanes, "connector")
        _reject(ours.lanes, theirs.lanes, "direction", field="lane")
        raise HandshakeRejected("host", ours.host, theirs.host)
    on_gpu = any(side.device.startswith("cuda") for side in (ours, theirs))
    quick = Direction.PULL if on_gpu else Direction.PUSH
    return sorted(
        usable,
        key=lambda lane: (lane.connector not in _ONE_HOST, lane.connector, lane.direction != quick),
    )


_ONE_HOST = ("peer",)
"""Connectors that reach workers of the same host only."""


def _reject(ours: Iterable[Lane], theirs: Iterable[Lane], name: str, field: str = "") -> None:
    """Raise HandshakeRejected if no value of `name` is on both sides."""
    mine, yours = ({str(getattr(lane, name)) for lane in side} for side in (ours, theirs))
    if not mine & yours:
        raise HandshakeRejected(field or name, ",".join(sorted(mine)), ",".join(sorted(yours)))


def best_of(lanes: Sequence[Lane], gbps: Mapping[Lane, float]) -> Lane | None:
    """The quickest lane measured; of those within a tenth of it, the first of `lanes`."""
    quickest = max(gbps.values(), default=0.0)
    near = [lane for lane in lanes if gbps.get(lane, 0.0) >= _NEAR * quickest > 0]
    return near[0] if near else None


_NEAR = 0.9
"""Short trials differ by as much from one time to the next."""
