"""The ranks of one tensor-parallel worker: rank 0 is this process, the others follow it.

    rank 0                                   follower r, a process each
    call(method, …) ──── Call ────────────▶  its thread of that line runs the method
      runs it itself ◀── gloo or NCCL ────▶    (where it is a collective)
    results by rank ◀─── Reply ────────────

All ranks run the same calls in the same order. What one of them alone cannot do is undone by the
others where that is possible; where it is not, and when one dies, the group is of no use any more:
its followers are killed, and every call raises WorkerDied.
"""

from __future__ import annotations

import itertools
import logging
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvxfer.errors import CacheError, KvxferError, RankFailed, UsageError, WireError, WorkerDied
from kvxfer.model.tensor_parallel import TensorParallel
from kvxfer.worker.follower import Follower, start_follower
from kvxfer.worker.rank_host import RankGrowth, RankHost
from kvxfer.worker.rank_methods import METHODS, LineName, Method
from kvxfer.worker.rank_wire import FIRST_CALL, GREETING, Call, Reply, decode, encode

logger = logging.getLogger(__name__)

END_TIMEOUT_S = 2.0
"""For followers to end by themselves; then SIGKILL."""
BEGIN_TIMEOUT_S = 300.0
"""For a follower to import what it needs, which takes 7 s of one core."""
FAILURE_GRACE_S = 10.0
"""For the others' replies after rank 0 has failed in a collective: they fail likewise, or wait for
it in vain."""


class RankGroup:
    """Starts and owns the followers, and rank 0's RankHost. Each line is used by one thread at a
    time; different lines at the same time."""

    def __init__(self, devices: Sequence[str]) -> None:
        """One rank for each device. Returns at once; the followers import what they need. Called
        in a thread that lives as long as the group (see `worker.follower`)."""
        if not devices:
            raise UsageError("tensor_parallel_size", 0, "must be at least 1")
        self.size = len(devices)
        self._problem = ""
        self._locks = {name: threading.Lock() for name in LineName}
        self._numbers: dict[LineName, Iterator[int]] = {
            name: itertools.count(1) for name in LineName
        }
        self._followers: list[Follower] = []
        with ExitStack() as undo:
            undo.callback(self._end_followers, 0.0)
            directory = tempfile.TemporaryDirectory(prefix="kvxfer-ranks-")  # mode 0700
            undo.callback(directory.cleanup)
            rendezvous = Path(directory.name) / "rendezvous"
            self.host = RankHost(TensorParallel(0, self.size, rendezvous), devices[0])
            for rank in range(1, self.size):
                self._followers.append(start_follower(self.host.place, rank, devices[rank]))
            undo.pop_all()
        self._directory = directory

    def call(self, name: str, *arguments: Any, own: Callable[[], Any] | None = None) -> list[Any]:
        """`name` of METHODS on every rank, rank 0's part in this thread: results by rank. `own` is
        done for rank 0's part, to the same effect.

        Raises what rank 0 raises where all ranks raise the same, RankFailed where some fail in what
        is no collective, WorkerDied where a rank dies, is late, or leaves the others in a
        collective: then, and from then on.
        """
        method = METHODS[name]
        own = own or partial(method.run, self.host, *arguments)
        with self._locks[method.line]:
            self._check_usable()
            try:
                return self._in_step(name, method, arguments, own)
            except BaseException as error:
                if not isinstance(error, KvxferError):
                    self._break(f"rank 0 of {self.size}: {name}: {type(error).__name__}: {error}")
                raise

    def extend(self, num_blocks: Sequence[int]) -> tuple[int, ...]:
        """Back at least so many blocks of each group on all ranks, or on none; returns the blocks
        that every rank has. Raises as `call`; after RankFailed no rank has grown."""
        return self.grow(num_blocks)[0].backed

    def grow(self, num_blocks: Sequence[int]) -> list[RankGrowth]:
        """`extend`, and what each rank has registered: the same regions, or RankFailed and no rank
        has grown."""
        try:
            grown: list[RankGrowth] = self.call("prepare", list(num_blocks))
            self._check_alike(grown)
        except WorkerDied:
            raise
        except KvxferError as error:
            self._undo_growth(error)
            raise
        self.call("confirm")
        return grown

    def _check_alike(self, grown: Sequence[RankGrowth]) -> None:
        """Peers are told of one cache's regions and blocks, which stand for all."""
        for rank, one in enumerate(grown):
            if (one.backed, one.regions) != (grown[0].backed, grown[0].regions):
                text = f"{one.backed} blocks in {len(one.regions)} new regions are not as rank 0's"
                raise RankFailed(rank, self.size, CacheError.__name__, text)

    def check(self) -> None:
        """Raise WorkerDied if the group is of no use any more; notices a follower's end."""
        self._check_usable()
        for follower in self._followers:
            if follower.process.poll() is not None:
                raise self._break(self._named(follower, follower.fate()))

    def close(self) -> None:
        """End the followers, then give back what rank 0 has. Nobody calls meanwhile. Idempotent."""
        self._problem = self._problem or "the ranks were closed"
        for follower in self._followers:
            for line in follower.lines.values():
                line.close()
        self.host.close()
        self._end_followers(END_TIMEOUT_S)
        self._directory.cleanup()

    def _in_step(
        self, name: str, method: Method, arguments: tuple[Any, ...], own: Callable[[], Any]
    ) -> list[Any]:
        number = next(self._numbers[method.line])
        if number == FIRST_CALL:
            self._meet(method.line)
        deadline_s = time.monotonic() + method.timeout_s
        call = Call(number, name, msgspec.Raw(encode(arguments)))
        for follower in self._followers:
            try:
                follower.lines[method.line].send(call, method.timeout_s)
            except KvxferError as error:
                raise self._lost(follower, name) from error
        outcomes: list[Any] = [_attempt(own)]
        doing = name
        if method.is_collective and isinstance(outcomes[0], KvxferError):
            deadline_s = min(deadline_s, time.monotonic() + FAILURE_GRACE_S)
            if not isinstance(outcomes[0], WorkerDied):
                doing = f"{name}, where rank 0 failed: {outcomes[0]}"
        for follower in self._followers:
            timeout_s = max(0.0, deadline_s - time.monotonic())
            reply = self._receive(follower, method.line, doing, number, timeout_s)
            outcomes.append(self._outcome(follower, method, doing, reply))
        self._judge(name, method, outcomes)
        return outcomes

    def _meet(self, line: LineName) -> None:
        """Wait until every follower serves the line."""
        deadline_s = time.monotonic() + BEGIN_TIMEOUT_S
        for follower in self._followers:
            timeout_s = max(0.0, deadline_s - time.monotonic())
            self._receive(follower, line, "its start", GREETING, timeout_s)

    def _outcome(self, follower: Follower, method: Method, doing: str, reply: Reply) -> Any:
        """The follower's result, or its error as RankFailed."""
        if reply.error:
            return RankFailed(follower.rank, self.size, reply.error, reply.text)
        try:
            return decode(reply.result, method.result)
        except WireError as error:
            raise self._lost(follower, doing) from error

    def _receive(
        self, follower: Follower, line: LineName, doing: str, number: int, timeout_s: float
    ) -> Reply:
        try:
            reply: Reply = follower.lines[line].receive(Reply, timeout_s)
            if reply.number != number:
                raise WireError(f"reply {reply.number} to call {number}")
        except KvxferError as error:
            raise self._lost(follower, doing) from error
        return reply

    def _judge(self, name: str, method: Method, outcomes: Sequence[Any]) -> None:
        """Raise where any rank failed; see `call`."""
        kinds = [_kind(outcome) for outcome in outcomes]
        if not any(kinds):
            return
        own = outcomes[0]
        rank = next(rank for rank, kind in enumerate(kinds) if kind)
        if method.is_collective and (len(set(kinds)) > 1 or kinds[0] in _MID_WAY):
            raise self._break(f"{name}: the ranks are out of step: {_told(outcomes[rank])}")
        if all(kinds) and len(set(kinds)) == 1:
            raise own
        if rank == 0:
            raise RankFailed(0, self.size, kinds[0], str(own)) from own
        raise outcomes[rank]

    def _undo_growth(self, cause: KvxferError) -> None:
        try:
            self.call("retract")
        except WorkerDied:
            raise
        except KvxferError as error:
            reason = f"a growth failed ({cause}) and could not be taken back: {error}"
            raise self._break(reason) from error

    def _check_usable(self) -> None:
        if self._problem:
            raise WorkerDied(self._problem)

    def _lost(self, follower: Follower, doing: str) -> WorkerDied:
        """A follower whose line is of no use any more."""
        try:
            follower.process.wait(1.0)  # its lines close a moment before it can be waited for
        except subprocess.TimeoutExpired:
            logger.warning("rank %d does not answer: it is killed", follower.rank)
        return self._break(self._named(follower, f"{follower.fate()} during {doing}"))

    def _break(self, reason: str) -> WorkerDied:
        """The first reason stays. Whoever waits for a follower, on any line or in a collective, is
        set free by its end."""
        self._problem = self._problem or reason
        for follower in self._followers:
            follower.process.kill()
        return WorkerDied(self._problem)

    def _named(self, follower: Follower, text: str) -> str:
        return f"rank {follower.rank} of {self.size} (pid {follower.process.pid}) {text}"

    def _end_followers(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for follower in self._followers:
            follower.end(max(0.0, deadline_s - time.monotonic()))


_MID_WAY = frozenset({"ModelOutOfMemory", "WorkerDied"})
"""Errors that ranks may raise at different places of a pass: what each has sent the others by then
may differ, and would be taken for the next pass's."""


def _kind(outcome: Any) -> str:
    """The name of the error that a rank raised; '' for a result."""
    if isinstance(outcome, RankFailed):
        return outcome.kind
    return type(outcome).__name__ if isinstance(outcome, KvxferError) else ""


def _told(error: KvxferError) -> str:
    return str(error) if isinstance(error, RankFailed) else f"rank 0: {error}"


def _attempt(own: Callable[[], Any]) -> Any:
    """The result, or the KvxferError that it raised."""
    try:
        return own()
    except KvxferError as error:
        return error
