"""How a worker leaves without losing anything.

| worker   | meaning                                   | leaves by                               |
| ---      | ---                                       | ---                                     |
| SERVING  | it takes what comes                       | a router's Drain, or a signal where     |
|          |                                           | `shutdown_timeout_s` is given           |
|          |                                           | → DRAINING; any other signal → OVER     |
| DRAINING | it refuses what is new, so that it goes   | all is done, or late → OVER             |
|          | elsewhere, and finishes what it has       |                                         |
| OVER     | it says Goodbye and ends                  |                                         |

Whoever knows it is told when it begins to drain. What it serves has deadlines of its own; blocks
that somebody else may still write to have none, and are waited for `transfer_timeout_s` after that.
After a signal all of it has `shutdown_timeout_s`; a second one ends it at once.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvxfer.config import WorkerOptions
from kvxfer.control.router_messages import Drain
from kvxfer.errors import WireError

if TYPE_CHECKING:
    from kvxfer.worker.peers import PeerTable

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""What is refused may be asked again after so long, of this worker's successor if of nobody else.
"""


class DrainState(enum.Enum):
    SERVING = enum.auto()
    DRAINING = enum.auto()
    OVER = enum.auto()


class Draining:
    """Control thread only, but for `stop`."""

    def __init__(self, options: WorkerOptions, peers: PeerTable) -> None:
        self._peers = peers
        self._shutdown_timeout_s = options.shutdown_timeout_s
        self._transfer_timeout_s = options.transfer_timeout_s
        self._num_signals = 0
        self._deadline_s = float("inf")
        self._served_s: float | None = None
        """When the last that it served was done."""
        self.state = DrainState.SERVING
        self.is_clean = False
        """It is over, and nothing was under way."""
        self.reason = ""
        """Why nothing new is taken, or ''."""
        self.handlers: dict[type, Callable[[str, Any], None]] = {Drain: self._on_drain}

    def stop(self) -> None:
        """A signal came. Only counts, so that it is safe in its handler."""
        self._num_signals += 1

    def begin(self, reason: str) -> None:
        """Idempotent."""
        if self.state is DrainState.SERVING:
            self.state, self.reason = DrainState.DRAINING, reason or "it drains"
            logger.info("takes nothing new: %s", self.reason)
            for peer in self._peers.all():
                if peer.is_met:
                    self._peers.send(peer.key, Drain(self.reason))

    def _on_drain(self, key: str, drain: Drain) -> None:
        """A router's order; from a worker the word that itself takes nothing new. Raises WireError
        for one that nobody knows."""
        peer = self._peers.get(key)
        if peer is None or not peer.is_met:
            raise WireError(f"Drain from {key}, whom we do not know")
        if peer.facts is None:
            self.begin(drain.reason)
        else:
            peer.is_draining = True

    def tick(self, is_serving: bool, is_busy: bool) -> None:
        """`is_serving`: somebody waits for an answer; `is_busy`: or blocks are not ours yet."""
        now = time.monotonic()
        if self._num_signals and self._deadline_s == float("inf"):
            self._deadline_s = now + self._shutdown_timeout_s
            if self._shutdown_timeout_s:
                self.begin("it was told to stop")
        if self._num_signals > 1 or now >= self._deadline_s:
            self.state = DrainState.OVER
        elif self.state is DrainState.DRAINING and not is_serving:
            self._served_s = self._served_s or now
            late = now - self._served_s > self._transfer_timeout_s
            if late or not is_busy:
                self.state, self.is_clean = DrainState.OVER, not is_busy
