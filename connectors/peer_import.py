"""The importer's side of `peer`: one owner's chunks, mapped into one range at their own offsets.

The importer asks for every chunk that was described to it and takes none that it did not ask for:
what arrives late for a description that was replaced is closed and forgotten. Everything here is
driven by `advance` and never blocks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from connectors.handover_socket import (
    SERIALS_A_FRAME,
    Dialling,
    HungUp,
    Open,
    Refused,
    Serial,
    Want,
    close_all,
    receive_by_importer,
    send,
)
from kvxfer.errors import ConnectorError, DriverError
from kvxfer.memory.driver import VmmDriver
from kvxfer.transfer.boxes import Box, spread
from kvxfer.transfer.reach import RemotePeer
from kvxfer.transfer.regions import Region, RegionSet

DIAL_TIMEOUT_S = 10.0
TURN_S = 0.005
"""About how long one `advance` maps: a GPU's driver takes 0.1 ms a chunk."""
BUSY_TURN_S = 0.0003
"""The same while copies are under way, whose ends are looked for between turns."""

Chunk = tuple[Serial, Serial, Serial]
"""(serial, offset, size)."""
_Size = Annotated[int, msgspec.Meta(gt=0, le=2**62)]


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner's description says beside its regions."""

    host: Annotated[str, msgspec.Meta(max_length=64)]
    """Identity of the running kernel."""
    place: Annotated[str, msgspec.Meta(max_length=64)]
    """Which memory of that host: 'host', or a GPU by its UUID."""
    socket_name: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    size_bytes: _Size
    """Of the whole reservation."""
    granularity: _Size
    chunks: list[Chunk]
    """Of each described region."""

    @classmethod
    def of(cls, metadata: bytes, remote: RemotePeer) -> Reach:
        """Raises ConnectorError for what contradicts itself, or `remote`."""
        try:
            reach = msgspec.msgpack.decode(metadata, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConnectorError(f"peer description of {remote.agent}: {error}") from error
        if not set(reach.regions().values()) <= set(remote.regions.regions):
            raise ConnectorError(f"peer description of {remote.agent}: chunks are not its regions")
        for region in reach.regions().values():
            if region.end > reach.size_bytes or (region.offset | region.size) % reach.granularity:
                raise ConnectorError(
                    f"peer description of {remote.agent}: {region} does not lie on granules of "
                    f"{reach.granularity} bytes within its {reach.size_bytes}"
                )
        return reach

    def regions(self) -> dict[int, Region]:
        """By serial."""
        return {serial: Region(offset, size) for serial, offset, size in self.chunks}


class Link:
    """A connection to one owner, and what is mapped of its memory.

    `failure` is None, or why nothing more may be started over it: its mappings go, by `release`,
    as soon as no copy reads them (`users`).
    """

    def __init__(
        self, driver: VmmDriver, reach: Reach, directory: Path, token: bytes, our_name: str
    ) -> None:
        """Raises ConnectorError when nobody listens, or addresses cannot be had."""
        self.failure: str | None = None
        self.users = 0
        self.reach = reach
        self._driver = driver
        self._described: dict[int, Region] = {}
        self._serials: dict[Region, int] = {}
        """The same, the other way round."""
        self._unasked: list[int] = []
        self._asked: set[int] = set()
        self._mapped: dict[int, tuple[Region, int]] = {}
        """By serial: where, and the driver's handle."""
        self._arrived: deque[tuple[Chunk, int]] = deque()
        """What is to be mapped next, with descriptors that are ours to close."""
        self._opening: Open | None = Open(token, our_name)
        self._deadline = time.monotonic() + DIAL_TIMEOUT_S
        with ExitStack() as undo:
            self._dialling = Dialling(directory, reach.socket_name)
            undo.callback(self._dialling.socket.close)
            self._is_connected = self._dialling.attempt()
            with _translated("reserve"):
                self.base_address = driver.reserve(reach.size_bytes)
            undo.pop_all()

    def describe(self, reach: Reach) -> None:
        """Ask for what `reach` names more. Changes nothing when it raises ConnectorError."""
        if (reach.socket_name, reach.size_bytes) != (self.reach.socket_name, self.reach.size_bytes):
            raise ConnectorError("the owner's socket or reservation is another one than before")
        named = reach.regions()
        for serial, region in named.items():
            known = self._serials.get(region, serial), self._described.get(serial, region)
            if known != (serial, region):
                raise ConnectorError(f"{region} is another chunk now, and was not revoked before")
        new = [serial for serial in named if serial not in self._described]
        self._described |= named
        self._serials |= {region: serial for serial, region in named.items()}
        self._unasked += [serial for serial in new if serial not in self._asked]

    def renew(self, reach: Reach) -> None:
        """Unmap what `reach` does not name, and `describe` it. No copy may be under way.

        Raises ConnectorError: then the link is to be lost and released.
        """
        if self.users:
            raise ConnectorError(f"{self.users} copies still read what is to be unmapped")
        named = reach.regions()
        for serial in [serial for serial in self._mapped if serial not in named]:
            self._unmap(serial)
        gone = [one for one in self._arrived if one[0][0] not in named]
        self._arrived = deque(one for one in self._arrived if one[0][0] in named)
        self._asked.difference_update(chunk[0] for chunk, _ in gone)
        close_all([fd for _, fd in gone])
        self._described = {s: region for s, region in self._described.items() if s in named}
        self._serials = {region: serial for serial, region in self._described.items()}
        self._unasked = [serial for serial in self._unasked if serial in named]
        self.describe(reach)

    def awaited(self, boxes: Iterable[Box], regions: RegionSet) -> set[int]:
        """Serials of the chunks among `regions` that the sources of `boxes` touch and that are not
        mapped yet. Raises ConnectorError for one that was not described over this connection."""
        if len(self._mapped) == len(self._described) == len(regions.regions):
            return set()
        missing = [r for r in regions.regions if self._serials.get(r, -1) not in self._mapped]
        starts = np.array([region.offset for region in missing], dtype=np.int64)
        ends = np.array([region.end for region in missing], dtype=np.int64)
        touched = np.zeros(len(missing) + 1, dtype=np.int64)
        for box in boxes:
            part = box.src_stretches()
            src = spread(part.starts, part.extents, part.strides)
            np.add.at(touched, np.searchsorted(ends, src, side="right"), 1)
            np.add.at(touched, np.searchsorted(starts, src + part.size_bytes, side="left"), -1)
        needed = [missing[index] for index in np.flatnonzero(np.cumsum(touched[:-1]))]
        for region in needed:
            if region not in self._serials:
                raise ConnectorError(f"{region} was not described over this connection")
        return {self._serials[region] for region in needed}

    def has_mapped(self, serials: Iterable[int]) -> bool:
        return all(serial in self._mapped for serial in serials)

    def advance(self, turn_s: float = TURN_S) -> None:
        """Dial, ask, receive, and map for about `turn_s`. Raises nothing: what goes wrong loses the
        link."""
        if self.failure is not None:
            return
        try:
            if self._is_open():
                self._ask()
                turn_end = time.monotonic() + turn_s
                while self._map_next() and time.monotonic() < turn_end:
                    pass
        except ConnectorError as error:
            self.lose(str(error))

    def lose(self, reason: str) -> None:
        """Hang up, for good."""
        if self.failure is None:
            self.failure = reason
            self._dialling.socket.close()
            close_all([fd for _, fd in self._arrived])
            self._arrived.clear()

    def release(self) -> None:
        """Give back mappings and addresses of a lost link without users. Idempotent.

        Raises ConnectorError when the driver refuses: some of it stays then.
        """
        for serial in list(self._mapped):
            self._unmap(serial)
        if self.base_address:
            with _translated("free"):
                self._driver.free(self.base_address, self.reach.size_bytes)
            self.base_address = 0

    def _is_open(self) -> bool:
        """Whether the owner has our invitation, or will find it in the socket."""
        self._is_connected = self._is_connected or self._dialling.attempt()
        if self._opening is not None and self._is_connected and self._send(self._opening):
            self._opening = None
        if self._opening is not None and time.monotonic() > self._deadline:
            raise ConnectorError(f"the owner's queue was full for {DIAL_TIMEOUT_S:g} s")
        return self._opening is None

    def _ask(self) -> None:
        while self._unasked:
            some = self._unasked[:SERIALS_A_FRAME]
            if not self._send(Want(some)):
                return
            self._asked.update(some)
            del self._unasked[: len(some)]

    def _send(self, frame: Open | Want) -> bool:
        """Whether it need not be tried again."""
        try:
            return send(self._dialling.socket, frame)
        except HungUp:
            return True  # receiving tells why

    def _map_next(self) -> bool:
        """Map one chunk; False if there is none."""
        if not self._arrived and not self._receive():
            return False
        chunk, fd = self._arrived.popleft()
        try:
            self._take(*chunk, fd)
        finally:
            close_all([fd])
        return True

    def _receive(self) -> bool:
        """Take what one frame brings; False if there is none."""
        received = receive_by_importer(self._dialling.socket)
        if received is None:
            return False
        frame, fds = received
        with ExitStack() as stack:
            stack.callback(close_all, fds)
            if isinstance(frame, Refused):
                raise ConnectorError(f"the owner refused: {frame.reason}")
            self._arrived.extend(zip(frame.chunks, fds, strict=True))
            stack.pop_all()
        return bool(self._arrived)

    def _take(self, serial: int, offset: int, size: int, fd: int) -> None:
        if serial not in self._asked:
            raise ConnectorError(f"the owner sent chunk {serial}, which was not asked for")
        self._asked.remove(serial)
        region = self._described.get(serial)
        if region is None:
            return  # revoked since
        if (region.offset, region.size) != (offset, size):
            raise ConnectorError(f"the owner sent [{offset}, +{size}) in place of {region}")
        with _translated(f"import of {region}"):
            handle = self._driver.import_(fd, self.base_address + offset, size, writable=False)
        self._mapped[serial] = region, handle

    def _unmap(self, serial: int) -> None:
        region, handle = self._mapped[serial]
        with _translated(f"unmapping of {region}"):
            self._driver.decommit(self.base_address + region.offset, region.size, handle)
        del self._mapped[serial]


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """DriverError as ConnectorError."""
    try:
        yield
    except DriverError as error:
        raise ConnectorError(f"{what} of a peer: {error}") from error
