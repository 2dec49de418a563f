"""All connectors of one worker, side by side over the same memory: each lane uses one of them.

Named after vLLM's MultiConnector. What one of them cannot do for a peer leaves the others as they
are; registrations are common to all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count

import msgspec

from kvxfer.errors import ConnectorError, OutOfReach
from kvxfer.transfer.connector import Connector, Direction, MemoryWindow, TicketResult
from kvxfer.transfer.lanes import AUTO, Lane
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region

logger = logging.getLogger(__name__)

_Parts = dict[str, bytes]


class MultiConnector:
    """Owns `connectors`. Threads and contracts as `Connector`'s, whose methods it has."""

    def __init__(self, connectors: Mapping[str, Connector], initiates: Direction) -> None:
        """`initiates`: what this worker starts: decode workers pull, prefill workers push."""
        self.connectors = dict(connectors)
        self._initiates = initiates
        for connector in connectors.values():
            connector.initiates = initiates
        self._reached: dict[str, set[str]] = {}
        """By peer, the connectors that know it."""
        self._tickets = count(1)
        self._ours: dict[tuple[str, int], int] = {}
        """(connector, its ticket) to ours."""

    @classmethod
    def open(
        cls,
        types: Mapping[str, type[Connector]],
        agent_name: str,
        memory: MemoryWindow,
        initiates: Direction,
        all_needed: bool = True,
        lane: str = AUTO,
    ) -> MultiConnector:
        """All of `types`, or ConnectorError and none. Unless `all_needed`, those that can be had
        here, at least one; a line of the log says why not the others. `lane`: one of LANES, as the
        worker was told."""
        made: dict[str, Connector] = {}
        with ExitStack() as undo:
            for name, kind in types.items():
                try:
                    made[name] = kind(agent_name, memory)
                except ConnectorError as error:
                    if all_needed or (name == list(types)[-1] and not made):
                        raise
                    logger.warning("the %s connector is left out: %s", name, error)
                else:
                    undo.callback(made[name].close)
                    if lane != AUTO:
                        made[name].expects = frozenset({Direction(lane)})
            undo.pop_all()
        return cls(made, initiates)

    def exercise(self, scratch: MemoryWindow) -> ExitStack:
        with ExitStack() as undo:
            for connector in self.connectors.values():
                undo.enter_context(connector.exercise(scratch))
            return undo.pop_all()

    def register(self, regions: Sequence[Region]) -> None:
        with ExitStack() as undo:
            for connector in self.connectors.values():
                connector.register(regions)
                undo.callback(connector.deregister, regions)
            undo.pop_all()

    def deregister(self, regions: Sequence[Region]) -> None:
        with ExitStack() as release:
            # In the order of their names, the last one in the stack first: a worker that has little
            # time left is rid of `peer`'s socket before NIXL's agent ends, which takes longest.
            for connector in reversed(self.connectors.values()):
                release.callback(connector.deregister, regions)

    def describe(self, regions: Sequence[Region]) -> bytes:
        return _pack(lambda connector: connector.describe(regions), self.connectors)

    def revoke(self, left: Sequence[Region], epoch: int) -> bytes:
        return _pack(lambda connector: connector.revoke(left, epoch), self.connectors)

    def retire(self, kept: Collection[int]) -> None:
        with ExitStack() as release:
            for connector in self.connectors.values():
                release.callback(connector.retire, kept)

    def invite(self) -> bytes:
        return _pack(lambda connector: connector.invite(), self.connectors)

    def connect(
        self, peer: str, base_address: int, description: bytes, invitation: bytes = b""
    ) -> frozenset[str]:
        """Learn a peer, or more of its regions, by every connector that may start transfers with
        it; returns the names of those that know it now.

        A connector that cannot reach a new peer is left out (a warning says why, but for those that
        are for peers elsewhere), unless there is
        no other: ConnectorError. So is one that fails to learn more of a peer that it knows.
        """
        told, invited = _unpack(description), _unpack(invitation)
        known = self._reached.get(peer, set())
        failures: list[ConnectorError] = []
        for name, connector in self._concerned(told):
            try:
                connector.connect(peer, base_address, told[name], invited.get(name, b""))
            except ConnectorError as error:
                if name in known:
                    raise
                failures.append(error)
            else:
                known = known | {name}
        if failures and not known:
            raise failures[0]
        if not told.keys() & self.connectors.keys():
            names = ", ".join(self.connectors)
            raise ConnectorError(f"peer {peer} has none of our connectors: {names}")
        for failure in failures:
            is_fault = not isinstance(failure, OutOfReach)
            logger.log(logging.WARNING if is_fault else logging.DEBUG, "%s", failure)
        self._reached[peer] = known
        return frozenset(known)

    def renew(self, peer: str, base_address: int, description: bytes) -> frozenset[str]:
        """As `Connector.renew`, by every connector that knows the peer."""
        told = _unpack(description)
        for name in sorted(self._reached.get(peer, ())):
            self.connectors[name].renew(peer, base_address, told.get(name, b""))
        return frozenset(self._reached.get(peer, ()))

    def submit(self, peer: str, lane: Lane, plan: TransferPlan) -> int:
        connector = self.connectors.get(lane.connector)
        if connector is None or lane.direction not in connector.directions:
            raise ConnectorError(f"lane {lane}: this worker has none such")
        theirs = connector.submit(peer, lane.direction, plan)
        ticket = next(self._tickets)
        self._ours[lane.connector, theirs] = ticket
        return ticket

    @property
    def is_busy(self) -> bool:
        return any(connector.is_busy for connector in self.connectors.values())

    def poll(self) -> list[TicketResult]:
        ended = []
        for name, connector in self.connectors.items():
            for result in connector.poll():
                ended.append(TicketResult(self._ours.pop((name, result.ticket)), result.error))
        return ended

    def disconnect(self, peer: str) -> None:
        self._reached.pop(peer, None)
        with ExitStack() as release:
            for connector in self.connectors.values():
                release.callback(connector.disconnect, peer)

    def is_leaving(self, agent: str) -> bool:
        return any(connector.is_leaving(agent) for connector in self.connectors.values())

    def close(self) -> None:
        with ExitStack() as release:
            for connector in self.connectors.values():
                release.callback(connector.close)

    def _concerned(self, told: Mapping[str, bytes]) -> Iterator[tuple[str, Connector]]:
        """Who is to learn a peer: one that only the other side starts transfers with is not."""
        for name, connector in self.connectors.items():
            if name in told and self._initiates in connector.directions:
                yield name, connector


def _pack(say: Callable[[Connector], bytes], connectors: Mapping[str, Connector]) -> bytes:
    return msgspec.msgpack.encode({name: say(one) for name, one in connectors.items()})


def _unpack(parts: bytes) -> _Parts:
    if not parts:
        return {}
    try:
        return msgspec.msgpack.decode(parts, type=_Parts)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConnectorError(f"description does not decode: {error}") from error
