"""Regions read ahead of use: which, when, and what a read that hangs or fails can do."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
import pytest

import kvxfer.transfer.agent_connector
from connectors.loopback import LoopbackAgent
from kvxfer.errors import ConnectorError
from kvxfer.transfer.agent_connector import AgentConnector
from kvxfer.transfer.connector import Direction, MemoryWindow
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.reach import RemotePeer
from kvxfer.transfer.regions import Region
from kvxfer.transfer.warming import BATCH_REGIONS

NUM_REGIONS = BATCH_REGIONS + 10
REGIONS = [Region(index * 64, 64) for index in range(NUM_REGIONS)]
_names = count()


class ReadingAgent(LoopbackAgent):
    """Loopback whose reads ahead of use end when they are told to."""

    def __init__(self, name: str, memory: MemoryWindow) -> None:
        super().__init__(name, memory)
        self.read: list[tuple[str, list[Region]]] = []
        self.ends = True
        self.failure: ConnectorError | None = None
        self.refusal: ConnectorError | None = None
        self.removed: list[str] = []

    def warm(self, remote: RemotePeer, regions: Sequence[Region]) -> object:
        if self.refusal is not None:
            raise self.refusal
        self.read.append((remote.agent, list(regions)))
        return "read"

    def is_finished(self, handle: object) -> bool:
        if handle != "read":
            return super().is_finished(handle)  # type: ignore[arg-type]
        if self.failure is not None:
            raise self.failure
        return self.ends

    def remove_peer(self, agent: str) -> None:
        self.removed.append(agent)


class ReadingConnector(AgentConnector):
    agent_class = ReadingAgent

    @property
    def agent(self) -> ReadingAgent:
        assert isinstance(self._epoch.agent, ReadingAgent)
        return self._epoch.agent


class Pair:
    """A connector, and a peer that it is to learn."""

    def __init__(self) -> None:
        self.windows = [np.zeros(NUM_REGIONS * 64, dtype=np.uint8) for _ in range(2)]
        self.left, self.right = (
            ReadingConnector(
                f"warming-{next(_names)}", MemoryWindow(int(w.ctypes.data), w.nbytes, "cpu")
            )
            for w in self.windows
        )
        self.right.register(REGIONS)
        self.base = int(self.windows[1].ctypes.data)

    def connect(self, regions: Sequence[Region]) -> None:
        self.left.connect("right", self.base, self.right.describe(regions))

    def renew(self, regions: Sequence[Region]) -> None:
        self.left.renew("right", self.base, self.right.describe(regions))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    agent = made.left.agent
    yield made
    agent.ends = True
    made.left.close()
    made.right.close()


def test_new_regions_are_read_once_in_batches_one_at_a_time(pair: Pair) -> None:
    agent = pair.left.agent
    agent.ends = False
    pair.connect(REGIONS)
    for _ in range(3):
        assert pair.left.poll() == []
    assert [len(regions) for _, regions in agent.read] == [BATCH_REGIONS]
    agent.ends = True
    pair.left.poll()
    pair.left.poll()
    assert [region for _, regions in agent.read for region in regions] == REGIONS


def test_only_what_is_new_is_read(pair: Pair) -> None:
    agent = pair.left.agent
    pair.connect(REGIONS[:2])
    pair.left.poll()
    pair.connect(REGIONS[:5])
    pair.connect(REGIONS[:5])
    for _ in range(3):
        pair.left.poll()
    assert [regions for _, regions in agent.read] == [REGIONS[:2], REGIONS[2:5]]


def test_transfers_do_not_wait_for_it(pair: Pair) -> None:
    pair.left.agent.ends = False
    pair.left.register(REGIONS)
    pair.connect(REGIONS)
    pair.left.poll()
    pair.windows[1][:64] = 9
    start, size = np.array([0], dtype=np.int64), np.array([64], dtype=np.int64)
    ticket = pair.left.submit("right", Direction.PULL, TransferPlan.of_runs(start, start, size))
    assert [result.ticket for result in pair.left.poll()] == [ticket]
    assert (pair.windows[0][:64] == 9).all()


@pytest.mark.parametrize("when", ["failure", "refusal"])
def test_a_read_that_fails_is_a_warning_and_the_next_goes_on(
    pair: Pair, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    agent = pair.left.agent
    setattr(agent, when, ConnectorError("no such luck"))
    pair.connect(REGIONS)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            assert pair.left.poll() == []
    assert [record.message.count("no such luck") for record in caplog.records] == [1, 1]


def test_an_agent_is_removed_only_when_its_read_has_ended(pair: Pair) -> None:
    agent = pair.left.agent
    agent.ends = False
    pair.connect(REGIONS)
    pair.left.poll()
    pair.left.disconnect("right")
    pair.left.poll()
    assert agent.removed == []
    agent.ends = True
    pair.left.poll()
    pair.left.poll()
    assert len(agent.removed) == 1
    assert len(agent.read) == 1, "the rest was dropped with the peer"


def test_renewal_waits_for_a_read_of_what_was_revoked(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = pair.left.agent
    agent.ends = False
    pair.connect(REGIONS)
    pair.left.poll()
    monkeypatch.setattr(kvxfer.transfer.agent_connector, "_CLOSE_TIMEOUT_S", 0.05)
    with pytest.raises(ConnectorError, match="did not end"):
        pair.renew(REGIONS[:1])
    with pytest.raises(ConnectorError, match="not connected"):
        pair.left.submit("right", None, None)  # type: ignore[arg-type]
    agent.ends = True
    pair.connect(REGIONS[:1])
    pair.renew(REGIONS[:2])
    assert agent.removed, "what was revoked is out of reach"
    for _ in range(3):
        pair.left.poll()
    assert agent.read[-1][1] == REGIONS[:2]


def test_a_read_that_hangs_does_not_keep_the_connector_open(pair: Pair) -> None:
    pair.left.agent.ends = False
    pair.connect(REGIONS)
    pair.left.poll()
    start_s = time.monotonic()
    pair.left.close()
    assert time.monotonic() - start_s < 2.0
