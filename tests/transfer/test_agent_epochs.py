"""A connector's earlier agents, and a peer's: what is still under way with them holds up what."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

import kvxfer.transfer.agent_connector
from connectors.loopback import _AGENTS, LoopbackAgent
from kvxfer.errors import ConnectorError
from kvxfer.transfer.agent_connector import AgentConnector
from kvxfer.transfer.agent_epoch import agent_name, life_of
from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region

REGION = Region(0, 64)
_names = count()


class HangingAgent(LoopbackAgent):
    """Loopback whose transfers end when they are told to."""

    ends = True

    def is_finished(self, handle: object) -> bool:
        return type(self).ends and super().is_finished(handle)  # type: ignore[arg-type]


class HangingConnector(AgentConnector):
    agent_class = HangingAgent


class Side:
    def __init__(self) -> None:
        self.bytes = np.zeros(REGION.size, dtype=np.uint8)
        self.base = int(self.bytes.ctypes.data)
        self.name = f"epochs-{next(_names)}"
        self.connector = HangingConnector(self.name, MemoryWindow(self.base, REGION.size, "cpu"))
        self.connector.register([REGION])

    def meet(self, other: Side, told: bytes = b"", name: str = "other") -> None:
        told = told or other.connector.describe([REGION])
        self.connector.connect(name, other.base, told)

    def push(self, name: str = "other") -> int:
        column = np.zeros(1, dtype=np.int64)
        plan = TransferPlan.of_runs(column, column, column + REGION.size)
        return self.connector.submit(name, Direction.PUSH, plan)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Side, Side]]:
    monkeypatch.setattr(kvxfer.transfer.agent_connector, "_CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(HangingAgent, "ends", True)
    sides = Side(), Side()
    yield sides
    HangingAgent.ends = True
    for side in sides:
        side.connector.close()
        assert not [name for name in _AGENTS if life_of(name) == side.name]


def test_agents_of_one_connector_are_told_by_their_names() -> None:
    for life in ("decode-0.0f3a", "a.e1x", "x"):
        names = [agent_name(life, epoch) for epoch in (0, 1, 12)]
        assert len(set(names)) == 3
        assert {life_of(name) for name in names} == {life}


def test_an_agent_outlives_its_epoch_by_our_own_transfers(pair: tuple[Side, Side]) -> None:
    left, right = pair
    left.meet(right)
    HangingAgent.ends = False
    left.bytes[:] = 5
    ticket = left.push()
    left.connector.revoke([REGION], 1)
    left.connector.retire(())
    assert left.connector.poll() == []
    assert left.name in _AGENTS
    HangingAgent.ends = True
    (result,) = left.connector.poll()
    assert (result.ticket, result.error) == (ticket, None)
    assert left.name not in _AGENTS
    assert (right.bytes == 5).all()


def test_a_new_agent_is_met_when_nothing_is_under_way_with_the_old_one(
    pair: tuple[Side, Side],
) -> None:
    """Its owner ends the old one as soon as we say that we know the new one."""
    left, right = pair
    left.meet(right)
    HangingAgent.ends = False
    left.push()
    left.connector.disconnect("other")
    told = right.connector.revoke([REGION], 1)
    for name in ("other", "under another name"):
        with pytest.raises(ConnectorError, match=f"{right.name} has not ended"):
            left.meet(right, told, name)
    HangingAgent.ends = True
    (result,) = left.connector.poll()
    assert result.error is not None and "disconnected" in result.error
    left.meet(right, told)
    left.push()
    assert left.connector.poll()[0].error is None


def test_renewal_waits_for_what_an_earlier_session_left_under_way(
    pair: tuple[Side, Side],
) -> None:
    """Under another name: whom a worker was dialled by has one for each connection."""
    left, right = pair
    left.meet(right)
    HangingAgent.ends = False
    left.push()
    left.connector.disconnect("other")
    left.meet(right, name="other again")
    told = right.connector.revoke([REGION], 1)
    start_s = time.monotonic()
    with pytest.raises(ConnectorError, match="did not end"):
        left.connector.renew("other again", right.base, told)
    assert time.monotonic() - start_s < 5.0
    HangingAgent.ends = True
    left.connector.poll()
    left.meet(right, told, "other again")
    left.push("other again")
    assert left.connector.poll()[0].error is None


def test_a_revocation_that_fails_changes_nothing(pair: tuple[Side, Side]) -> None:
    left, right = pair
    right.meet(left)
    with pytest.raises(ConnectorError, match="not registered"):
        left.connector.revoke([REGION, Region(64, 64)], 1)
    assert [name for name in _AGENTS if life_of(name) == left.name] == [left.name]
    right.push()
    assert right.connector.poll()[0].error is None
