"""The thread that owns the connector and the cache's memory: every call into either is here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from kvxfer.cache.kv_cache import Extension, KVCache
from kvxfer.errors import ConnectorError, KvxferError
from kvxfer.telemetry.trace import now_ns
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.multi import MultiConnector
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.regions import Region
from kvxfer.worker.mailbox import Mailbox
from kvxfer.worker.work_thread import Job, Report, WorkThread

logger = logging.getLogger(__name__)

BUSY_WAIT_S = 0.0002
"""Pause between polls while tickets of ours are in flight."""
GPU_BUSY_WAIT_S = 0.00002
"""... of GPU memory, whose copies take less than that, on machines with cores to spare."""
SERVING_WAIT_S = 0.002
"""... while a peer may need our progress (a connector without a progress thread of its own)."""
IDLE_WAIT_S = 0.02


@dataclass(frozen=True, slots=True)
class Movement:
    """A transfer that ended; `error` is None or says why its bytes must not be used."""

    num_bytes: int
    num_runs: int
    """Before runs that adjoin are joined and chunk edges cut them."""
    start_ns: int
    end_ns: int
    error: str | None


@dataclass(frozen=True, slots=True)
class Growth:
    """What an extension added, registered and ready to be told to peers."""

    extension: Extension
    regions: tuple[Region, ...]
    update: bytes
    """The connector's description of `regions`."""
    description: bytes
    """... and of everything registered."""


@dataclass(frozen=True, slots=True)
class _Flight:
    peer: str
    plan: TransferPlan
    start_ns: int
    ended: Callable[[Movement], None]

    def landed(self, error: str | None) -> Movement:
        plan = self.plan
        num_runs = sum(box.num_runs for box in plan.boxes)  # descriptors are not made for this
        return Movement(plan.total_bytes, num_runs, self.start_ns, now_ns(), error)


class TransferThread(WorkThread):
    """Callbacks run in the control thread. Owns `connector`; shares `cache` with nobody who
    commits (the model thread only touches committed blocks)."""

    def __init__(
        self,
        connector: MultiConnector,
        cache: KVCache,
        reports: Mailbox[Report],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__("transfer", reports, begin)
        self._connector = connector
        self._cache = cache
        self._registered: tuple[Region, ...] = ()
        self._flights: dict[int, _Flight] = {}
        self._renewals: dict[str, list[Job]] = {}
        """Peers that are to be learnt afresh: that, and the moves that wait for it, in order."""
        self._awaited: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self._is_polling = True
        on_gpu = cache.buffer.device != "cpu"
        self._busy_wait_s = GPU_BUSY_WAIT_S if on_gpu else BUSY_WAIT_S
        self.is_closed = False
        self.serving = False
        """Set by the control thread while a peer may be moving bytes of ours."""

    def move(
        self,
        peer: str,
        lane: Lane,
        plan: TransferPlan,
        ended: Callable[[Movement], None],
    ) -> None:
        """Submit `plan`; `ended` is called exactly once, also when it could not be submitted."""
        start_ns = now_ns()

        def run() -> None:
            flight = _Flight(peer, plan, now_ns(), ended)
            ticket = self._connector.submit(peer, lane, plan)
            self._flights[ticket] = flight

        def failed(error: KvxferError) -> None:
            ended(_Flight(peer, plan, start_ns, ended).landed(str(error)))

        self._in_turn(peer, Job(run, _ignore, failed))

    def when(self, is_done: Callable[[], bool], then: Callable[[], None]) -> None:
        """Have `then` run in the control thread once `is_done`, which is asked at every turn."""
        self.submit(lambda: self._awaited.append((is_done, then)), _ignore, _raise)

    def grow(
        self,
        num_blocks: Sequence[int],
        done: Callable[[Growth], None],
        failed: Callable[[KvxferError], None],
    ) -> None:
        """Extend the cache, or wake it up if it sleeps, and register the new chunks: both, or
        neither."""
        self.submit(lambda: self._grow(num_blocks), done, failed)

    def connect(
        self,
        peer: str,
        base_address: int,
        description: bytes,
        invitation: bytes,
        done: Callable[[frozenset[str]], None],
        failed: Callable[[KvxferError], None],
    ) -> None:
        """`done` is told which connectors know the peer now."""

        def run() -> frozenset[str]:
            return self._connector.connect(peer, base_address, description, invitation)

        self._in_turn(peer, Job(run, done, failed))

    def renew(
        self,
        peer: str,
        base_address: int,
        description: bytes,
        done: Callable[[frozenset[str]], None],
        failed: Callable[[KvxferError], None],
    ) -> None:
        """Learn the peer afresh, once our transfers with it have ended: it revoked regions. Those
        that come meanwhile wait."""

        def run() -> frozenset[str]:
            return self._connector.renew(peer, base_address, description)

        renewal = Job(run, done, failed)
        self.submit(lambda: self._renewals.setdefault(peer, []).append(renewal), _ignore, failed)

    def disconnect(self, peer: str, failed: Callable[[KvxferError], None]) -> None:
        def run() -> None:
            for job in self._renewals.pop(peer, []):
                self.report(partial(job.failed, ConnectorError(f"peer {peer} was disconnected")))
            self._connector.disconnect(peer)

        self.submit(run, _ignore, failed)

    def release(
        self,
        regions: Sequence[Region],
        release: Callable[[], object],
        done: Callable[[object], None],
        failed: Callable[[KvxferError], None],
    ) -> None:
        """Deregister `regions`, of which no transfer of ours is under way, then `release` them."""

        def run() -> object:
            self._connector.deregister(regions)
            gone = set(regions)
            self._registered = tuple(r for r in self._registered if r not in gone)
            return release()

        self.submit(run, done, failed)

    def bury(self, done: Callable[[None], None], failed: Callable[[KvxferError], None]) -> None:
        self.submit(self._cache.bury, done, failed)

    def describe(
        self,
        regions: Sequence[Region],
        done: Callable[[bytes], None],
        failed: Callable[[KvxferError], None],
    ) -> None:
        """The connector's description of registered `regions`, to be told to peers."""
        self.submit(lambda: self._connector.describe(regions), done, failed)

    def close_connector(self) -> None:
        """The last job before `stop`; `is_closed` says whether the transport is at rest, so that
        memory may be unmapped."""
        self.submit(self._close, lambda _: None, lambda error: None)

    def _in_turn(self, peer: str, job: Job) -> None:
        """Submit `job`, which waits where the peer is to be learnt afresh first."""

        def run() -> None:
            if peer in self._renewals:
                self._renewals[peer].append(job)
            else:
                self._execute(job)

        self.submit(run, _ignore, job.failed)

    def _renew(self) -> None:
        """What was held up for peers with whom nothing of ours is under way any more."""
        busy = {flight.peer for flight in self._flights.values()}
        for peer in self._renewals.keys() - busy:
            for job in self._renewals.pop(peer):
                self._execute(job)

    def _look_again(self) -> None:
        """In order, so that what was awaited first is told of first."""
        while self._awaited and self._awaited[0][0]():
            self.report(self._awaited.pop(0)[1])

    def _close(self) -> None:
        try:
            self._connector.deregister(self._registered)
            self._registered = ()
            self._is_polling = False
            self._connector.close()
            self.is_closed = True
        except KvxferError as error:
            logger.warning("the connector did not close: %s", error)

    def _grow(self, num_blocks: Sequence[int]) -> Growth:
        cache = self._cache
        with ExitStack() as undo:
            if cache.is_asleep:
                extension = cache.wake()
                undo.callback(cache.sleep)
            else:
                extension = cache.extend(num_blocks)
                undo.callback(cache.retract, extension)
            known = set(self._registered)
            chunks = [Region(chunk.offset, chunk.size) for chunk in cache.buffer.chunks]
            added = tuple(region for region in chunks if region not in known)
            self._connector.register(added)
            undo.callback(self._connector.deregister, added)
            registered = self._registered + added
            update = self._connector.describe(added)
            growth = Growth(extension, added, update, self._connector.describe(registered))
            self._registered = registered
            undo.pop_all()
        return growth

    def idle(self) -> float:
        if not self._is_polling:
            return IDLE_WAIT_S
        for result in self._connector.poll():
            flight = self._flights.pop(result.ticket)
            movement = flight.landed(result.error)
            self.report(partial(flight.ended, movement))
        if self._renewals:
            self._renew()
        if self._awaited:
            self._look_again()
        if self._flights or self._renewals or self._awaited or self._connector.is_busy:
            return self._busy_wait_s
        return SERVING_WAIT_S if self.serving else IDLE_WAIT_S


def _ignore(_: object) -> None: ...


def _raise(error: KvxferError) -> None:
    raise error
