"""The owner's side of `peer`: its chunks, for whoever shows an invitation and asks for them.

Nothing an importer does is trusted: what it sends is checked, and it is dropped for anything
wrong. Everything here is driven by `advance` and never blocks.
"""

from __future__ import annotations

import bisect
import hmac
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from connectors.handover_socket import (
    CHUNKS_A_FRAME,
    Chunks,
    HungUp,
    Listener,
    Open,
    Refused,
    ToOwner,
    Want,
    can_send,
    close_all,
    receive_by_owner,
    send,
)
from kvxfer.errors import ConnectorError, DriverError
from kvxfer.transfer.connector import MemoryWindow
from kvxfer.transfer.regions import Region

logger = logging.getLogger(__name__)

INVITATION_LIFETIME_S = 60.0
MAX_INVITATIONS = 256
OPEN_TIMEOUT_S = 5.0
"""In which an importer shows its invitation."""
MAX_IMPORTERS = 256
MAX_WANTED = 1 << 16
TURN_S = 0.005
"""About how long one `advance` may export: a GPU's driver takes 0.3–0.5 ms a chunk."""
FRAMES_A_TURN = 64
COMPLAINT_INTERVAL_S = 10.0

_TOKEN_BYTES = 32


class Invitations:
    """One-time rights to connect. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._issued: dict[bytes, float] = {}
        """Token to when it ends, oldest first."""

    def issue(self) -> bytes:
        """A new token; the oldest of too many becomes invalid."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        with self._lock:
            self._forget_expired()
            while len(self._issued) >= MAX_INVITATIONS:
                del self._issued[next(iter(self._issued))]
            self._issued[token] = time.monotonic() + INVITATION_LIFETIME_S
        return token

    def redeem(self, token: bytes) -> bool:
        """Whether `token` is valid, for the last time. Takes as long for any wrong token."""
        with self._lock:
            self._forget_expired()
            matches = [known for known in self._issued if hmac.compare_digest(known, token)]
            for known in matches:
                del self._issued[known]
        return bool(matches)

    def _forget_expired(self) -> None:
        now = time.monotonic()
        self._issued = {token: end for token, end in self._issued.items() if end > now}


class _Complaints:
    """Warnings at a bounded rate: whoever can reach the socket can cause them."""

    def __init__(self) -> None:
        self._next = 0.0
        self._suppressed = 0

    def log(self, text: str) -> None:
        now = time.monotonic()
        if now < self._next:
            self._suppressed += 1
            return
        more = f" (and {self._suppressed} more before)" if self._suppressed else ""
        logger.warning("peer: %s%s", text, more)
        self._next, self._suppressed = now + COMPLAINT_INTERVAL_S, 0


@dataclass(slots=True, eq=False)
class _Importer:
    """One connection. `agent` is empty until it has shown an invitation."""

    sock: socket.socket
    deadline: float
    agent: str = ""
    wanted: deque[int] = field(default_factory=deque)


class Exporter:
    """Serves the chunks of one buffer that were added."""

    def __init__(self, memory: MemoryWindow, directory: Path) -> None:
        if memory.buffer is None:
            raise ConnectorError("peer: this memory is not made of chunks that a peer could map")
        self.buffer = memory.buffer
        self._listener = Listener(directory)
        self.invitations = Invitations()
        self._regions: dict[int, Region] = {}
        """By serial."""
        self._importers: list[_Importer] = []
        self._complaints = _Complaints()

    @property
    def socket_name(self) -> str:
        return self._listener.name

    def add(self, serial: int, region: Region) -> None:
        """Raises ConnectorError for a region that is no chunk, or cannot be exported: the first is
        tried, the rest are of the same kind."""
        if self._regions:
            self._index_of(region)
        else:
            close_all([self._export(region)])
        self._regions[serial] = region

    def remove(self, serial: int) -> None:
        """It is not sent any more; who has it mapped keeps it."""
        del self._regions[serial]

    def advance(self) -> None:
        """Accept, authenticate and answer, for a few milliseconds at the most. Raises nothing: who
        cannot be served is dropped."""
        self._accept()
        turn_end = time.monotonic() + TURN_S
        for importer in list(self._importers):
            try:
                self._listen_to(importer)
                while importer.wanted and self._answer(importer):
                    if time.monotonic() > turn_end:
                        break
            except HungUp:
                self._hang_up(importer)
            except ConnectorError as error:
                self._drop(importer, str(error))

    def forget(self, agent: str) -> None:
        """Hang up on an importer."""
        for importer in [one for one in self._importers if one.agent == agent]:
            self._hang_up(importer)

    def close(self) -> None:
        """Idempotent."""
        for importer in list(self._importers):
            self._hang_up(importer)
        self._listener.close()

    def _accept(self) -> None:
        while len(self._importers) < MAX_IMPORTERS:
            try:
                accepted = self._listener.accept()
            except ConnectorError as error:
                self._complaints.log(str(error))
                return
            if accepted is None:
                return
            self._importers.append(_Importer(accepted, time.monotonic() + OPEN_TIMEOUT_S))

    def _listen_to(self, importer: _Importer) -> None:
        for _ in range(FRAMES_A_TURN):
            frame = receive_by_owner(importer.sock)
            if frame is None:
                break
            self._take(importer, frame)
        if not importer.agent and time.monotonic() > importer.deadline:
            raise ConnectorError(f"showed no invitation in {OPEN_TIMEOUT_S:g} s")

    def _take(self, importer: _Importer, frame: ToOwner) -> None:
        if isinstance(frame, Open) and not importer.agent:
            if not self.invitations.redeem(frame.token):
                raise ConnectorError("the invitation is not valid, or not any more")
            importer.agent = frame.agent
        elif isinstance(frame, Want) and importer.agent:
            importer.wanted.extend(frame.serials)
            if len(importer.wanted) > MAX_WANTED:
                raise ConnectorError(f"asked for more than {MAX_WANTED} chunks")
        else:
            raise ConnectorError(f"sent {type(frame).__name__} out of turn")

    def _answer(self, importer: _Importer) -> bool:
        """Send some of what is wanted; False if that has to wait. What was removed is left out."""
        if not can_send(importer.sock):
            return False
        serials: list[int] = []
        for serial in importer.wanted:
            if serial in self._regions:
                serials.append(serial)
            if len(serials) == CHUNKS_A_FRAME:
                break
        if serials and not self._send(importer.sock, serials):
            return False
        last = serials[-1] if serials else None
        while importer.wanted and importer.wanted.popleft() != last:
            pass
        return True

    def _send(self, sock: socket.socket, serials: Sequence[int]) -> bool:
        regions = [self._regions[serial] for serial in serials]
        fds: list[int] = []
        with ExitStack() as stack:
            stack.callback(close_all, fds)
            for region in regions:
                fds.append(self._export(region))
            told = zip(serials, regions, strict=True)
            frame = Chunks([(serial, region.offset, region.size) for serial, region in told])
            return send(sock, frame, fds)

    def _export(self, region: Region) -> int:
        """A descriptor, for reading only where there are such."""
        chunk = self.buffer.chunks[self._index_of(region)]
        try:
            return self.buffer.export(chunk, writable=False)
        except DriverError as error:
            raise ConnectorError(f"peer cannot hand over {region}: {error}") from error

    def _index_of(self, region: Region) -> int:
        chunks = self.buffer.chunks
        index = bisect.bisect_left(chunks, region.offset, key=lambda chunk: chunk.offset)
        for chunk in chunks[index : index + 1]:
            if (chunk.offset, chunk.size) == (region.offset, region.size):
                return index
        raise ConnectorError(f"peer: {region} is no chunk of this worker's memory")

    def _drop(self, importer: _Importer, reason: str) -> None:
        self._complaints.log(f"dropped importer {importer.agent or 'unknown'}: {reason}")
        with suppress(ConnectorError):  # it is gone already
            send(importer.sock, Refused(reason[:1024]))
        self._hang_up(importer)

    def _hang_up(self, importer: _Importer) -> None:
        importer.sock.close()
        self._importers.remove(importer)
