"""The thread that owns the connectors and the cache's memory: every call into either is here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvxfer.control.facts import RankFacts
from kvxfer.errors import ConnectorError, KvxferError
from kvxfer.telemetry.trace import now_ns
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.plan import TransferPlan
from kvxfer.transfer.rank_plans import RankMove
from kvxfer.transfer.regions import Region
from kvxfer.worker.mailbox import Mailbox
from kvxfer.worker.progress import Progress
from kvxfer.worker.rank_transfer import Growth, WorkerTransfer
from kvxfer.worker.transfer_counts import TransferCounts
from kvxfer.worker.transfer_log import TransferLog
from kvxfer.worker.work_thread import Job, Report, WorkThread

logger = logging.getLogger(__name__)

BUSY_WAIT_S = 0.0002
"""Pause between polls while tickets of ours are in flight."""
SERVING_WAIT_S = 0.002
"""... while a peer may need our progress (a connector without a progress thread of its own)."""
IDLE_WAIT_S = 0.02


@dataclass(frozen=True, slots=True)
class Movement:
    """A transfer that ended, in all ranks that took part; `error` is None or says why its bytes
    must not be used."""

    num_bytes: int
    num_runs: int
    """Before runs that adjoin are joined and chunk edges cut them."""
    start_ns: int
    end_ns: int
    error: str | None

    @property
    def elapsed_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def measured(self) -> tuple[int, int, int]:
        """Bytes, runs, nanoseconds."""
        return self.num_bytes, self.num_runs, self.elapsed_ns


@dataclass(slots=True)
class _Flight:
    """Moves that end together, with the last of them."""

    peer: str
    moves: Sequence[RankMove]
    start_ns: int
    ended: Callable[[Movement], None]
    num_under_way: int = 0
    error: str | None = None

    def landed(self) -> Movement:
        plans = [move.plan for move in self.moves]
        num_bytes = sum(plan.total_bytes for plan in plans)
        # Descriptors are not made for this.
        num_runs = sum(box.num_runs for plan in plans for box in plan.boxes)
        return Movement(num_bytes, num_runs, self.start_ns, now_ns(), self.error)


class TransferThread(WorkThread):
    """Callbacks run in the control thread. Owns `ranks`, which nobody else commits memory of (the
    model thread only touches committed blocks)."""

    def __init__(
        self,
        ranks: WorkerTransfer,
        reports: Mailbox[Report],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__("transfer", reports, begin)
        self._ranks = ranks
        self._flights: dict[int, _Flight] = {}
        self._renewals: dict[str, list[Job]] = {}
        """Peers that are to be learnt afresh: that, and the moves that wait for it, in order."""
        self._awaited: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self.progress = Progress()
        """The control thread's."""
        self.counts = TransferCounts()
        self.log = TransferLog()
        """The control thread's."""
        self._is_polling = True
        self.is_closed = False
        self.serving = False
        """Set by the control thread while a peer may be moving bytes of ours."""

    @property
    def wear(self) -> int:
        """As `Connector.wear`, of the one that has most. Any thread may ask."""
        return max((one.wear for one in self._ranks.connectors.values()), default=0)

    @property
    def size(self) -> int:
        """Ranks of this worker."""
        return self._ranks.size

    def move(
        self, peer: str, lane: Lane, plan: TransferPlan, ended: Callable[[Movement], None]
    ) -> None:
        """As `move_ranks`, between the first ranks of both."""
        self.move_ranks(peer, lane, [RankMove(0, 0, plan)], ended)

    def move_ranks(
        self,
        peer: str,
        lane: Lane,
        moves: Sequence[RankMove],
        ended: Callable[[Movement], None],
    ) -> None:
        """Submit `moves`; `ended` is called exactly once, when all of them have ended or could not
        be submitted: an error in one is the error of all."""
        token, logged = self.progress.began(peer), self.log.began(peer, lane)

        def landed(movement: Movement) -> None:
            self.progress.ended(peer, token)
            self.log.ended(logged, movement)
            self.counts.add(lane, movement)
            ended(movement)

        flight = _Flight(peer, moves, now_ns(), landed)

        def run() -> None:
            flight.start_ns = now_ns()
            for one in self._ranks.submit(peer, lane, moves):
                if one.error:
                    flight.error = flight.error or one.error
                else:
                    flight.num_under_way += 1
                    self._flights[one.ticket] = flight
            if not flight.num_under_way:
                self.report(partial(landed, flight.landed()))

        def failed(error: KvxferError) -> None:
            flight.error = str(error)
            landed(flight.landed())

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
        neither. Transfers go on meanwhile."""
        self.submit_steps(lambda: self._ranks.growing(num_blocks), done, failed)

    def connect(
        self,
        peer: str,
        ranks: Sequence[RankFacts],
        done: Callable[[frozenset[str]], None],
        failed: Callable[[KvxferError], None],
    ) -> None:
        """`done` is told which connectors know the peer now."""
        self._in_turn(peer, Job(lambda: self._ranks.connect(peer, ranks), done, failed))

    def renew(
        self,
        peer: str,
        ranks: Sequence[RankFacts],
        done: Callable[[frozenset[str]], None],
        failed: Callable[[KvxferError], None],
    ) -> None:
        """Learn the peer afresh, once our transfers with it have ended: it revoked regions. Those
        that come meanwhile wait."""
        renewal = Job(lambda: self._ranks.renew(peer, ranks), done, failed)
        self.submit(lambda: self._renewals.setdefault(peer, []).append(renewal), _ignore, failed)

    def disconnect(self, peer: str, failed: Callable[[KvxferError], None]) -> None:
        self.progress.forget(peer)

        def run() -> None:
            for job in self._renewals.pop(peer, []):
                self.report(partial(job.failed, ConnectorError(f"peer {peer} was disconnected")))
            self._ranks.disconnect(peer)

        self.submit(run, _ignore, failed)

    def release(
        self,
        regions: Sequence[Region],
        release: Callable[[], object],
        done: Callable[[object], None],
        failed: Callable[[KvxferError], None],
    ) -> None:
        """Deregister `regions`, of which no transfer of ours is under way, then `release` them."""
        self.submit(lambda: self._ranks.release(regions, release), done, failed)

    def revoke(
        self,
        left: Sequence[Region],
        epoch: int,
        done: Callable[[list[bytes]], None],
        failed: Callable[[KvxferError], None],
    ) -> None:
        """As `Connector.revoke`; descriptions by rank."""
        self.submit(lambda: self._ranks.revoke(left, epoch), done, failed)

    def retire(self, kept: frozenset[int], failed: Callable[[KvxferError], None]) -> None:
        """As `Connector.retire`."""
        self.submit(lambda: self._ranks.retire(kept), _ignore, failed)

    def bury(self, done: Callable[[None], None], failed: Callable[[KvxferError], None]) -> None:
        self.submit(self._ranks.bury, done, failed)

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
            self._is_polling = False
            self._ranks.close()
            self.is_closed = True
        except KvxferError as error:
            logger.warning("the connector did not close: %s", error)

    def idle(self) -> float:
        if not self._is_polling:
            return IDLE_WAIT_S
        for result in self._ranks.poll():
            flight = self._flights.pop(result.ticket)
            flight.num_under_way -= 1
            flight.error = flight.error or result.error
            if not flight.num_under_way:
                self.report(partial(flight.ended, flight.landed()))
        if self._renewals:
            self._renew()
        if self._awaited:
            self._look_again()
        waited_for = any(one.is_busy for one in self._ranks.connectors.values())
        if self._flights or self._renewals or self._awaited or waited_for:
            return BUSY_WAIT_S
        return SERVING_WAIT_S if self.serving else IDLE_WAIT_S


def _ignore(_: object) -> None: ...


def _raise(error: KvxferError) -> None:
    raise error
