"""Jobs that have not started: bounded, and each decode worker's in their turn.

Of each decode worker the first few are *called*: it is asked for blocks, so that the next one can
start when the model is free. One that answers late, or never, is passed over by the others.
"""

from __future__ import annotations

from itertools import islice

from kvxfer.worker.admission import GRANTS_AHEAD
from prefill.job import JobState, PrefillJob

MAX_UNFINISHED = 16
"""Jobs of one decode worker that were started and are not handed over: one whose KV leaves slowly
must not come to hold all blocks."""


class JobQueue:
    """Control thread only."""

    def __init__(self, limit: int) -> None:
        """`limit`: jobs of each decode worker."""
        self._limit = limit
        self._peers: dict[str, dict[str, PrefillJob]] = {}
        """By decode worker, whose turn it is first, and grant, in order of arrival."""
        self._unfinished: dict[str, int] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def num_of(self, peer: str) -> int:
        return len(self._peers.get(peer, ()))

    def is_full(self, peer: str) -> bool:
        return self.num_of(peer) >= self._limit

    def add(self, job: PrefillJob) -> None:
        """One that comes with blocks goes ahead of those that have none: what they wait for may be
        the blocks that it holds."""
        peer, grant_id = job.key
        jobs = self._peers.setdefault(peer, {})
        jobs[grant_id] = job
        self._length += 1
        if job.state is JobState.WAITING:
            without = [one for one in jobs.values() if one.state is not JobState.WAITING]
            for one in without:
                jobs[one.key[1]] = jobs.pop(one.key[1])

    def remove(self, job: PrefillJob) -> None:
        """Of one that is not in it, nothing."""
        peer, grant_id = job.key
        jobs = self._peers.get(peer, {})
        if jobs.pop(grant_id, None) is None:
            return
        self._length -= 1
        if not jobs:
            del self._peers[peer]

    def to_call(self) -> list[PrefillJob]:
        """Whose blocks shall be asked for now; they become CALLED."""
        found = []
        for jobs in self._peers.values():
            for job in islice(jobs.values(), GRANTS_AHEAD):
                if job.state is JobState.QUEUED:
                    job.state = JobState.CALLED
                    found.append(job)
        return found

    def next(self) -> PrefillJob | None:
        """Who starts next: the first with blocks of the decode worker whose turn it is."""
        for peer, jobs in self._peers.items():
            if self._unfinished.get(peer, 0) >= MAX_UNFINISHED:
                continue
            for job in islice(jobs.values(), GRANTS_AHEAD):
                if job.state is JobState.WAITING:
                    return job
        return None

    def start(self, job: PrefillJob) -> None:
        """It leaves the queue, and its decode worker's next turn comes after all the others'."""
        self.remove(job)
        peer = job.peer.key
        if peer in self._peers:
            self._peers[peer] = self._peers.pop(peer)
        self._unfinished[peer] = self._unfinished.get(peer, 0) + 1

    def finish(self, job: PrefillJob) -> None:
        """One that was started has ended."""
        peer = job.peer.key
        self._unfinished[peer] -= 1
        if not self._unfinished[peer]:
            del self._unfinished[peer]
