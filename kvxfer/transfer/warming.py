"""Regions of peers that were just learnt, read a little of before anybody waits for them.

What a transport does once a region (opening handles, learning keys) is done by then: the first
transfers over new regions were measured at a tenth of the rate of later ones (gpu, NIXL).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvxfer.errors import ConnectorError
from kvxfer.transfer.reach import RemotePeer
from kvxfer.transfer.regions import Region

if TYPE_CHECKING:
    from kvxfer.transfer.agent import Agent

logger = logging.getLogger(__name__)

BATCH_REGIONS = 64
"""Of one read; there is one at a time, so that no poll takes long."""


@dataclass(frozen=True, slots=True)
class _Read:
    remote: RemotePeer
    handle: Any


class Warming:
    """Reads under way and still to come, of all peers. A read that fails is a warning: a peer that
    is lost shows by its transfers and its silence."""

    def __init__(self) -> None:
        self._coming: deque[tuple[RemotePeer, tuple[Region, ...]]] = deque()
        self._read: _Read | None = None

    def add(self, remote: RemotePeer, regions: Sequence[Region]) -> None:
        """`regions` of `remote` are new; `advance` reads them."""
        for first in range(0, len(regions), BATCH_REGIONS):
            self._coming.append((remote, tuple(regions[first : first + BATCH_REGIONS])))

    def forget(self, agent: str) -> None:
        """What was not begun is dropped; what was begun cannot be stopped."""
        self._coming = deque(batch for batch in self._coming if batch[0].agent != agent)

    def forget_all(self) -> None:
        """`forget` everybody."""
        self._coming.clear()

    @property
    def reading(self) -> str:
        """The agent that is being read from; '' where none is."""
        return self._read.remote.agent if self._read is not None else ""

    def is_reading(self, agent: str) -> bool:
        return self.reading == agent

    @property
    def is_under_way(self) -> bool:
        return self._read is not None

    def advance(self, agent: Agent) -> None:
        """Look after the read under way; begin the next when there is none."""
        if self._read is not None and self._has_ended(agent, self._read):
            self._read = None
        while self._read is None and self._coming:
            self._begin(agent, *self._coming.popleft())

    def _begin(self, agent: Agent, remote: RemotePeer, regions: tuple[Region, ...]) -> None:
        try:
            handle = agent.warm(remote, regions)
        except ConnectorError as error:
            _warn(remote, error)
            return
        if handle is not None:
            self._read = _Read(remote, handle)

    def _has_ended(self, agent: Agent, read: _Read) -> bool:
        try:
            return agent.is_finished(read.handle)
        except ConnectorError as error:
            _warn(read.remote, error)
            return True


def _warn(remote: RemotePeer, error: ConnectorError) -> None:
    logger.warning("reading new regions of agent %s ahead of use failed: %s", remote.agent, error)
