"""Handing memory over to other processes of this host: descriptors, over Unix sockets.

Facts, checked on Linux 6.18 by tests/connectors unless said:
- A socket that has a path is found through the file system alone: processes in other network, PID
  and IPC namespaces can connect, if they share the directory.
- SOCK_SEQPACKET keeps frames apart, each with the descriptors that were sent with it, and tells an
  end of file. Sending is all or nothing.
- Descriptors that a receiver has no room for (too small a buffer, `ulimit -n`) are closed by the
  kernel, and the message says MSG_CTRUNC. A sender's copies can be closed once they were sent.
- Closing with unread frames resets the connection: the other side's next receive says so, once,
  and those after it what was sent before.
- The kernel takes 253 descriptors a message at the most. It refuses (ETOOMANYREFS) where a user has
  more of them under way than `ulimit -n` (read in unix(7)): they are tried again.
- A non-blocking connect succeeds at once, or fails with EAGAIN while the queue is full.
- A path of more than 107 bytes cannot be bound.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import stat
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from kvxfer.errors import ConnectorError, UsageError

DIRECTORY = "KVXFER_PEER_DIR"
"""Environment variable: where the sockets are; peers in containers share it, and only it."""

MAX_FRAME_BYTES = 16 << 10
CHUNKS_A_FRAME = 32
SERIALS_A_FRAME = 1024

_MAX_PATH_BYTES = 107
_SUFFIX = ".peer"
_BACKLOG = 64
_GONE = (errno.EPIPE, errno.ECONNRESET)
_LATER = (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)

Serial = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Number of a registration: one chunk of one owner, for ever."""


class Open(msgspec.Struct, frozen=True, tag=True):
    """First frame of an importer."""

    token: Annotated[bytes, msgspec.Meta(max_length=64)]
    agent: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class Want(msgspec.Struct, frozen=True, tag=True):
    """Chunks that an importer was told of and asks for."""

    serials: Annotated[list[Serial], msgspec.Meta(min_length=1, max_length=SERIALS_A_FRAME)]


class Chunks(msgspec.Struct, frozen=True, tag=True):
    """The owner's answer. As many descriptors come with it, in the same order."""

    chunks: Annotated[
        list[tuple[Serial, Serial, Serial]],
        msgspec.Meta(min_length=1, max_length=CHUNKS_A_FRAME),
    ]
    """(serial, offset, size)."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The owner's last frame."""

    reason: Annotated[str, msgspec.Meta(max_length=1024)]


ToOwner = Open | Want
ToImporter = Chunks | Refused


class HungUp(ConnectorError):
    """The other side closed the connection, or ended."""


_Frame = TypeVar("_Frame")
_TO_OWNER: msgspec.msgpack.Decoder[ToOwner] = msgspec.msgpack.Decoder(ToOwner)
_TO_IMPORTER: msgspec.msgpack.Decoder[ToImporter] = msgspec.msgpack.Decoder(ToImporter)


def socket_directory() -> Path:
    """The directory for sockets, made where it is missing. Only its owner can enter it.

    Raises UsageError when it is another user's, or open to others.
    """
    path = _directory_path()
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise UsageError(DIRECTORY, str(path), error.strerror or str(error)) from error
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(DIRECTORY, str(path), "is no directory")
    if found.st_uid != os.geteuid():
        raise UsageError(DIRECTORY, str(path), f"belongs to user {found.st_uid}, not to us")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise UsageError(DIRECTORY, str(path), f"is open to others (mode {mode:o}, not 700)")
    return path


def _directory_path() -> Path:
    given = os.environ.get(DIRECTORY, "")
    runtime = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(given) if given else Path(runtime) / f"kvxfer-{os.geteuid()}"


def remove_dead_sockets() -> None:
    """For who killed a process that had one, and does not want to wait until the next one starts.
    Raises ConnectorError."""
    with _translated("clearing up"):
        _remove_dead(_directory_path())


class Listener:
    """A socket of our own in `directory`; its file is gone after `close`."""

    def __init__(self, directory: Path) -> None:
        self.name = f"{secrets.token_hex(8)}{_SUFFIX}"
        self._path = directory / self.name
        # It gets its name when it listens: who finds a name that refuses has found a dead one.
        unnamed = directory / f"{self.name}.new"
        if len(os.fsencode(unnamed)) > _MAX_PATH_BYTES:
            limit = _MAX_PATH_BYTES - len(unnamed.name) - 1
            reason = f"is too long for sockets: at most {limit} bytes"
            raise UsageError(DIRECTORY, str(directory), reason)
        with _translated("listen"), ExitStack() as undo:
            _remove_dead(directory)
            self._socket = undo.enter_context(_new_socket())
            self._socket.bind(str(unnamed))
            undo.callback(unnamed.unlink)
            self._socket.listen(_BACKLOG)
            unnamed.rename(self._path)
            undo.pop_all()

    def accept(self) -> socket.socket | None:
        """The next importer, if one has come."""
        with _translated("accept"):
            try:
                accepted, _ = self._socket.accept()
            except BlockingIOError:
                return None
        accepted.setblocking(False)
        return accepted

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        with _translated("unlink"):
            self._path.unlink(missing_ok=True)


class Dialling:
    """A connection to a `Listener` that may take several attempts."""

    def __init__(self, directory: Path, name: str) -> None:
        """Raises ConnectorError for a name that none of our sockets has."""
        if not name.endswith(_SUFFIX) or Path(name).name != name:
            raise ConnectorError(f"{name!r} is no name of a socket")
        self._path = directory / name
        self.socket = _new_socket()

    def attempt(self) -> bool:
        """Whether it is made; raises ConnectorError when nobody listens."""
        try:
            self.socket.connect(str(self._path))
        except BlockingIOError:
            return False
        except OSError as error:
            text = f"socket {self._path}: {error.strerror or error}"
            raise ConnectorError(f"{text} (all peers of a host share {DIRECTORY})") from error
        return True


def send(sock: socket.socket, frame: msgspec.Struct, fds: Sequence[int] = ()) -> bool:
    """Whether `frame` was sent, with copies of `fds`; if not, it can be tried again.

    Raises HungUp when the other side is gone: receiving may tell why.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    try:
        sock.sendmsg([msgspec.msgpack.encode(frame)], rights)
    except OSError as error:
        if error.errno in _LATER:
            return False
        kind = HungUp if error.errno in _GONE else ConnectorError
        raise kind(f"sending to a peer: {error.strerror or error}") from error
    return True


def can_send(sock: socket.socket) -> bool:
    """Whether it is worth preparing a frame."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    return bool(poll.poll(0))


def receive_by_owner(sock: socket.socket) -> ToOwner | None:
    """An importer's next frame, None if there is none yet.

    Raises ConnectorError at its end, for anything but a frame, and for descriptors: none are taken.
    """
    data = receive(sock, 0)
    return None if data is None else _decoded(_TO_OWNER, data[0])


def receive_by_importer(sock: socket.socket) -> tuple[ToImporter, list[int]] | None:
    """The owner's next frame and its descriptors, which are the caller's then; errors as above."""
    data = receive(sock, CHUNKS_A_FRAME + 1)
    if data is None:
        return None
    payload, fds = data
    with ExitStack() as undo:
        undo.callback(close_all, fds)
        frame = _decoded(_TO_IMPORTER, payload)
        wanted = len(frame.chunks) if isinstance(frame, Chunks) else 0
        if len(fds) != wanted:
            raise ConnectorError(f"{wanted} descriptors were announced, {len(fds)} came")
        undo.pop_all()
    return frame, fds


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def receive(sock: socket.socket, max_fds: int) -> tuple[bytes, list[int]] | None:
    """The next frame as it came, and its descriptors, which are the caller's then; None if there is
    none yet. Raises HungUp at the end, ConnectorError for more than `max_fds` descriptors."""
    room = socket.CMSG_SPACE(4 * max_fds) if max_fds else 0
    arguments = MAX_FRAME_BYTES, room, socket.MSG_CMSG_CLOEXEC
    try:
        try:
            data, ancillary, flags, _ = sock.recvmsg(*arguments)
        except ConnectionResetError:
            data, ancillary, flags, _ = sock.recvmsg(*arguments)  # what it said before
    except BlockingIOError:
        return None
    except OSError as error:
        raise ConnectorError(f"receiving from a peer: {error.strerror or error}") from error
    fds = list(_unpacked(ancillary))
    with ExitStack() as undo:
        undo.callback(close_all, fds)
        if flags & socket.MSG_CTRUNC:
            reason = "more than there is room for (`ulimit -n`)" if max_fds else "none are taken"
            raise ConnectorError(f"a peer sent descriptors: {reason}")
        if flags & socket.MSG_TRUNC:
            raise ConnectorError(f"a peer sent a frame of more than {MAX_FRAME_BYTES} bytes")
        if not data:
            raise HungUp("the peer hung up")
        undo.pop_all()
    return data, fds


def _decoded(decoder: msgspec.msgpack.Decoder[_Frame], data: bytes) -> _Frame:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConnectorError(f"a peer sent no frame of ours: {error}") from error


def _unpacked(ancillary: Sequence[tuple[int, int, bytes]]) -> Iterator[int]:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds = array("i")
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            yield from fds


def _new_socket() -> socket.socket:
    with _translated("socket"):
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def _remove_dead(directory: Path) -> None:
    """Unlink sockets whose process ended without doing so: they refuse connections."""
    for path in directory.glob(f"*{_SUFFIX}"):
        with _new_socket() as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # full, or gone meanwhile: not ours to judge


@contextmanager
def _translated(call: str) -> Iterator[None]:
    """OSError of a socket as ConnectorError."""
    try:
        yield
    except OSError as error:
        raise ConnectorError(f"{call} of a peer socket: {error.strerror or error}") from error
