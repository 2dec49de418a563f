"""One trial of lanes, as decode leads it, and those that are over while their blocks are not ours.

A block belongs to its writer until that has said that it ended, or is fenced: prefill is asked
again for the word of a push, also once the trial is over and in another session. It pushes nothing
of a trial that it says is over, so the answer holds for all that is still under way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvxfer.cache.pools import BlockPools
from kvxfer.control.lane_messages import LanePush, LanePushed, LaneTrial
from kvxfer.control.session import Peer
from kvxfer.transfer.lane_costs import LaneSamples
from kvxfer.transfer.lanes import Lane


@dataclass
class Trial:
    peer: Peer
    peer_name: str
    """The worker's id: at the address that we dialled there may be another one later."""
    trial_id: str
    num_tokens: int
    blocks: list[list[int]]
    """Of ours, group by group: only the first has any."""
    deadline_s: float
    lanes: list[Lane]
    """Not tried yet."""
    fallback: Lane
    """Where none can be tried out in time."""
    tokens: int = 0
    """Being moved: the first few, or all."""
    source: list[int] = field(default_factory=list)
    """Prefill's blocks with the pattern."""
    lane: Lane | None = None
    """Being tried."""
    times_ns: list[int] = field(default_factory=list)
    gbps: dict[Lane, float] = field(default_factory=dict)
    samples: LaneSamples = field(default_factory=LaneSamples)
    errors: dict[Lane, str] = field(default_factory=dict)
    work_in_flight: int = 0
    """Reads of ours, and other work on the blocks."""
    is_written: bool = False
    """Prefill was asked to push and has not said that it did."""
    is_over: bool = False
    ask_at_s: float = 0.0
    """When to say again what was not answered by then."""

    @property
    def unanswered(self) -> LaneTrial | LanePush | None:
        """What prefill owes a word for: either may be said any number of times."""
        if self.is_written:
            return LanePush(self.trial_id, str(self.lane), self.tokens)
        if self.source or self.is_over:
            return None
        return LaneTrial(self.trial_id, self.num_tokens, self.blocks[0])

    def is_answered_by(self, pushed: LanePushed) -> bool:
        """Whether it is the word that is waited for, not an earlier one that comes again."""
        told = pushed.trial_id, pushed.lane, pushed.num_tokens
        return self.is_written and told == (self.trial_id, str(self.lane), self.tokens)

    @property
    def pause_is_over(self) -> bool:
        return time.monotonic() >= self.ask_at_s


class EndedTrials:
    """Trials that are over while something may still write to their blocks. Control thread only."""

    def __init__(self, pools: BlockPools) -> None:
        self._pools = pools
        self._trials: list[Trial] = []

    def __len__(self) -> int:
        return len(self._trials)

    def __iter__(self) -> Iterator[Trial]:
        return iter(list(self._trials))

    def add(self, trial: Trial) -> None:
        trial.is_over = True
        self._pools.quarantine(trial.blocks)
        self._trials.append(trial)
        self.give_back()

    def fenced(self, worker_id: str) -> None:
        """Nothing more will be written for trials of this worker that are over."""
        for trial in self._trials:
            if trial.peer_name == worker_id:
                trial.is_written = False
        self.give_back()

    def give_back(self) -> None:
        for trial in self:
            if not trial.is_written and trial.work_in_flight == 0:
                self._trials.remove(trial)
                self._pools.release_quarantined(trial.blocks)
