"""The control thread of a worker: it waits, dispatches, ticks, and never blocks."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kvxfer.control.channel import Channel, Letter
from kvxfer.control.router_messages import Status, StatusQuery
from kvxfer.errors import HandshakeRejected, KvxferError, WorkerDied
from kvxfer.worker.draining import Draining, DrainState
from kvxfer.worker.growth import CacheGrowth
from kvxfer.worker.mailbox import Mailbox
from kvxfer.worker.peers import PeerTable
from kvxfer.worker.residency import Residency
from kvxfer.worker.watermarks import Watermarks
from kvxfer.worker.work_thread import Report

logger = logging.getLogger(__name__)

TICK_S = 0.05
HOUSEKEEPING_S = 0.005
"""Between two looks at who is there and how full the cache is: turns are many where hand-overs
are, and such things change slowly."""

Handler = Callable[[str, Any], None]


class Role(Protocol):
    """What makes a worker a prefill or a decode worker."""

    handlers: dict[type, Handler]
    """Message type → handler(peer key, message)."""

    @property
    def is_serving(self) -> bool:
        """Whether somebody waits for an answer of it."""

    @property
    def is_busy(self) -> bool:
        """The same, or somebody may still write to blocks that it gave up."""

    def tick(self) -> None:
        """Deadlines and whatever else is due; called at least every TICK_S."""

    def status(self) -> dict[str, int | float | str]: ...


class ControlLoop:
    """Runs until it has drained, a signal, or a fatal error. All handlers run in the thread that
    calls `run`."""

    def __init__(
        self,
        channel: Channel,
        reports: Mailbox[Report],
        peers: PeerTable,
        growth: CacheGrowth,
        residency: Residency,
        watermarks: Watermarks,
        role: Role,
        draining: Draining,
        worker_id: str,
        check: Callable[[], None] = lambda: None,
        turned: Callable[[], None] = lambda: None,
    ) -> None:
        """`check` is called before every turn, `turned` after it; what they raise ends the
        worker."""
        self._channel = channel
        self._reports = reports
        self._peers = peers
        self._growth = growth
        self._residency = residency
        self._watermarks = watermarks
        self._role = role
        self._worker_id = worker_id
        self._check = check
        self._turned = turned
        self._draining = draining
        self._num_misplaced = 0
        self._num_wrong = 0
        self._housekeep_at_s = 0.0
        self._handlers: dict[type, Handler] = {
            **peers.handlers,
            StatusQuery: self._on_status_query,
            **draining.handlers,
            **residency.handlers,
            **role.handlers,
        }
        channel.watch(reports.fileno())

    def also(self, handlers: Mapping[type, Handler]) -> None:
        """Have these called, too; before `run`."""
        self._handlers |= handlers

    def run(self) -> None:
        """Until `kvxfer.worker.draining` says that it is over."""
        while self._draining.state is not DrainState.OVER:
            self.turn(TICK_S)
            self._draining.tick(self._role.is_serving, self._role.is_busy)

    def turn(self, timeout_s: float) -> None:
        """Wait for at most `timeout_s` for something to do, and do all there is."""
        self._check()
        letters = self._channel.poll(timeout_s)
        self._channel.gather()
        try:
            self._do(letters)
        finally:
            self._channel.let_go()
        self._turned()

    def turn_deaf(self, timeout_s: float) -> None:
        """As `turn`, but peers are not listened to: what they say waits until there is an answer.
        While the worker starts, which has told nobody of itself."""
        self._check()
        select.select([self._reports.fileno()], [], [], timeout_s)
        self._do([])
        self._turned()

    def _do(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            self._receive(letter)
        for report in self._reports.drain():
            report()
        self._growth.settle(self._peers.laggards, self._peers.lose)
        self._residency.settle()
        if time.monotonic() >= self._housekeep_at_s:
            self._housekeep_at_s = time.monotonic() + HOUSEKEEPING_S
            self._peers.tick()
            self._watermarks.tick()
        self._role.tick()

    def _receive(self, letter: Letter) -> None:
        """What a peer sends may cost the peer its session, never the worker its life."""
        self._peers.heard(letter.peer)
        handler = self._handlers.get(type(letter.message))
        name = type(letter.message).__name__
        if handler is None:
            self._num_misplaced += 1
            logger.warning("dropped %s from %s: not for this worker", name, letter.peer)
            return
        try:
            handler(letter.peer, letter.message)
        except (HandshakeRejected, WorkerDied):
            raise
        except KvxferError as error:
            self._num_wrong += 1
            logger.warning("%s from %s: %s", name, letter.peer, error)
            self._peers.lose(letter.peer, f"it sent a wrong {name}: {error}")

    def turned_away(self) -> dict[str, int]:
        """Messages and connections that came to nothing, by name."""
        return {
            **self._channel.counts(),
            "misplaced_messages": self._num_misplaced,
            "wrong_messages": self._num_wrong,
        }

    def _on_status_query(self, key: str, query: StatusQuery) -> None:
        self._peers.send(key, Status(self._worker_id, self._role.status() | self.turned_away()))
