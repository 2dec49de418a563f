"""A peer's engine, and the runs under way with it.

Facts (mooncake-transfer-engine-non-cuda 0.3.13.post1; measured, or read in its source):
- The first call with a peer opens its segment under a lock that all transfers take, and waits for
  60 s for the answer of a process that is stopped. So a thread of its own asks first, without it.
- A peer is a host and a port, and memory an address: nothing says whose life it is. The next one to
  listen there may have memory at that address. So a mark of the peer's is read first.
- A batch counts as failed when one of its descriptors has, while others still move; its timeouts
  say nothing about where bytes are; and one of 8,192 descriptors overran the queue of 1,024 a peer,
  wrote some of them, and no later one got in. So each descriptor is a batch of its own: it ends
  once, and says how. A hundred or so at a time keep the engine as busy as larger batches did.
- A descriptor takes 70-90 µs of the two engines' threads, however many are under way.
- A refused descriptor costs its connection, and of those one a peer is made again in a second: 512
  refused ones took over 20 s to end. So few are under way before the first has moved.
- Asking after a batch that has ended frees it: its number is never asked about again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Annotated, Any

import msgspec
import numpy as np

from connectors.mooncake_engine import load_engine
from kvxfer.errors import ConnectorError
from kvxfer.transfer.connector import Direction

MOST_UNDER_WAY = 128
"""Runs with one peer. Its queue takes 1,024."""
FIRST_UNDER_WAY = 8
"""Runs of a transfer of which none has moved yet."""
MARK_BYTES = 32
MEETING_TIMEOUT_S = 10.0
"""For the mark to be read, once the peer's engine has answered."""

_POLL_INTERVAL_S = 0.0005
_REFUSED = "failed a run: the peer has gone, or has the range no longer registered"
_ABANDONED: list[object] = []  # what a read that did not end may still write to


class Told(msgspec.Struct, frozen=True):
    """What an agent's metadata says of its engine."""

    address: Annotated[str, msgspec.Meta(min_length=3, max_length=300)]
    """host:port."""
    mark_at: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """Where in the agent's memory the mark lies."""
    mark: Annotated[bytes, msgspec.Meta(min_length=MARK_BYTES, max_length=MARK_BYTES)]
    """Random bytes, of this agent alone."""


class Session:
    """The way to a peer's engine. A thread, which ends by itself, makes sure that it is the one
    that was told of; all else is called by one thread."""

    def __init__(self, engine: Any, told: Told) -> None:
        self.engine = engine
        self.told = told
        self.num_under_way = 0
        self._verdict: str | None = None
        """'' of a peer that may be used, or why not; None until that is known."""
        threading.Thread(target=self._meet, name="mooncake-meeting", daemon=True).start()

    @property
    def is_met(self) -> bool:
        """Raises ConnectorError where the peer's engine cannot be used."""
        if self._verdict:
            raise ConnectorError(self._verdict)
        return self._verdict is not None

    @property
    def has_failed(self) -> bool:
        return bool(self._verdict)

    def fail(self, reason: str) -> None:
        """Whoever answers there now has to show the mark again, in a session of its own."""
        self._verdict = self._verdict or reason

    def _meet(self) -> None:
        try:
            verdict = self._why_not()
        except (
            RuntimeError,
            ValueError,
            TypeError,
        ) as error:  # what pybind makes of C++ exceptions
            verdict = f"Mooncake at {self.told.address}: {type(error).__name__}: {error}"
        self._verdict = verdict

    def _why_not(self) -> str:
        where = self.told.address
        if code := self.engine.send_probe(where):
            return f"no Mooncake engine answers at {where} (code {code})"
        seen = np.zeros(MARK_BYTES, dtype=np.uint8)
        batch = submit(
            self.engine, where, Direction.PULL, seen.ctypes.data, self.told.mark_at, MARK_BYTES
        )
        if batch == 0:
            return f"Mooncake opens no segment at {where}"
        deadline_s = time.monotonic() + MEETING_TIMEOUT_S
        while (has_ended := ended(self.engine, batch)) is None:
            if time.monotonic() > deadline_s:
                _ABANDONED.append(seen)
                return f"the Mooncake engine at {where} took over {MEETING_TIMEOUT_S:g} s to answer"
            time.sleep(_POLL_INTERVAL_S)
        if not has_ended or seen.tobytes() != self.told.mark:
            return f"the Mooncake engine at {where} is that of another process by now"
        return ""


class Transfer:
    """The runs of one plan: addresses and sizes. `advance` moves it on and never waits."""

    def __init__(
        self,
        session: Session,
        direction: Direction,
        ours: list[int],
        theirs: list[int],
        sizes: list[int],
    ) -> None:
        self._session = session
        self._direction = direction
        self._left = deque(zip(ours, theirs, sizes, strict=True))
        self._under_way: deque[int] = deque()
        """Batches, oldest first: the engine begins them in order, and ends them nearly so."""
        self._failure = ""
        self._limit = FIRST_UNDER_WAY

    def advance(self) -> bool:
        """Whether all has moved. Raises ConnectorError once nothing moves any more, if some has
        not moved; it is not called again then."""
        self._collect()
        if not self._failure:
            self._submit()
        if self._under_way:
            return False
        if self._failure:
            raise ConnectorError(self._failure)
        return not self._left

    def _collect(self) -> None:
        engine = self._session.engine
        while self._under_way:
            has_moved = ended(engine, self._under_way[0])
            if has_moved is None:
                return
            self._under_way.popleft()
            self._session.num_under_way -= 1
            if not has_moved:
                self._fail("failed a run: the peer has gone, or has the range no longer registered")

    def _submit(self) -> None:
        session = self._session
        try:
            if not session.is_met:
                return
        except ConnectorError as error:
            self._failure = str(error)
            return
        while self._left and self._has_room:
            ours, theirs, size = self._left[0]
            batch = submit(
                session.engine, session.told.address, self._direction, ours, theirs, size
            )
            if batch == 0:
                self._fail("took no run")
                return
            self._left.popleft()
            self._under_way.append(batch)
            session.num_under_way += 1

    @property
    def _has_room(self) -> bool:
        is_within = self._session.num_under_way < MOST_UNDER_WAY
        return is_within and len(self._under_way) < self._limit

    def _fail(self, what: str) -> None:
        self._failure = self._failure or f"Mooncake with {self._session.told.address} {what}"
        self._left.clear()
        self._session.fail(self._failure)


def submit(
    engine: Any, address: str, direction: Direction, ours: int, theirs: int, size: int
) -> int:
    """The batch, or 0 where the engine took none. Opens the peer's segment where it is not open."""
    operation = load_engine().TransferOpcode
    opcode = operation.Write if direction is Direction.PUSH else operation.Read
    batch: int = engine.batch_transfer_async(address, [ours], [theirs], [size], opcode)
    return batch


def ended(engine: Any, batch: int) -> bool | None:
    """None while it is under way; else whether it moved, and the number means nothing any more."""
    status = engine.transfer_check_status(batch)
    return None if status in (0, -2) else status == 1
