"""Mooncake's transfer engine: loaded once, told what kvxfer needs, started and made to end soon.

Facts (mooncake-transfer-engine-non-cuda 0.3.13.post1; measured, or read in its source):
- Importing it takes 0.15 s, loads a Go runtime and starts 5 threads that never end. An engine takes
  1 ms, 2 or 3 threads and 5 descriptors, all of which go with its last reference.
- Its destructor joins a thread that sits in an accept of at most 1 s, and holds the GIL meanwhile:
  no thread of the process ran for 0.7 s. With a receive timeout of 50 ms on that socket: 50 ms.
- It listens for handshakes and for data on all interfaces, at ports from 15,000 to 17,000, and asks
  nobody who they are: whoever reaches the ports may read and write what is registered.
- It takes RDMA wherever it finds a device, whatever protocol it is asked for (MC_FORCE_TCP=1).
- Without its pool every descriptor makes a connection, on the thread that submits it. Releases
  differ in what they do by themselves (MC_TCP_ENABLE_CONNECTION_POOL=1).
- A WRITE is complete when the owner's engine says that it lies in memory: not so with the older
  framing (MC_TCP_PROTO=1), and releases from before it are not told from later ones by the peer.
- It gives a stopped peer up after 30 s, though what is in the sockets lands when the peer goes on.
  Here deadlines are the worker's, and a ticket lasts until nothing can land any more: with both
  timeouts raised, transfers of 64 MiB with a process stopped for 75 s ended well when it went on.
- It writes to stderr, one line for every engine at the least (MC_LOG_LEVEL=ERROR).
"""

from __future__ import annotations

import functools
import os
import re
import socket
import struct
from fcntl import ioctl
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvxfer.errors import ConnectorError, UsageError

HOST = "KVXFER_MOONCAKE_HOST"
"""Environment variable: the address or name by which peers reach this host's engines."""

INSTALL = "pip install 'kvxfer[mooncake]' and, of Debian, libibverbs1"
PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
OLDEST = (0, 3, 13)

_SETTINGS = {
    "MC_FORCE_TCP": "1",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "86400",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "86400",
    "MC_LOG_LEVEL": "ERROR",
}
_OLD_FRAMING = "MC_TCP_PROTO"
_ACCEPT_TIMEOUT_S = 0.05
_DIAL_TIMEOUT_S = 1.0
_SIOCGIFADDR = 0x8915


@functools.cache
def load_engine() -> Any:
    """The module mooncake.engine. Raises UsageError, saying what to install, where it is not there
    or does not do. Variables that the user has set stand."""
    if os.environ.get(_OLD_FRAMING) == "1":
        reason = "writes would count as complete before they are: unset it"
        raise UsageError(_OLD_FRAMING, "1", reason)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake import engine
    except ImportError as error:
        reason = f"its engine cannot be imported ({error}): {INSTALL}"
        raise UsageError("connector", "mooncake", reason) from error
    _check_version(installed_version())
    return engine


def start_engine(host: str) -> tuple[Any, str]:
    """An engine, and what peers reach it by. Raises ConnectorError."""
    engine = load_engine().TransferEngine()
    if engine.initialize(host, "P2PHANDSHAKE", "tcp", "") != 0:
        raise ConnectorError(f"Mooncake starts no engine at {host}")
    port = engine.get_rpc_port()
    _shorten_accept(port)
    return engine, f"{host}:{port}"


def own_host() -> str:
    """How peers reach this host: as the user says, else the address that leads out of it, else that
    of any interface, else loopback."""
    chosen = os.environ.get(HOST, "")
    if chosen:
        try:
            socket.getaddrinfo(chosen, None, socket.AF_INET)
        except OSError as error:
            raise UsageError(HOST, chosen, f"is no IPv4 host: {error}") from error
        return chosen
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; an address that belongs to nobody
        except OSError:  # no route leads out
            return _some_address(probe)
        return str(probe.getsockname()[0])


def _some_address(probe: socket.socket) -> str:
    for _, name in socket.if_nameindex():
        if name == "lo":
            continue
        try:
            answer = ioctl(probe, _SIOCGIFADDR, struct.pack("16s24x", name.encode()[:15]))
        except OSError:  # it has no address
            continue
        return socket.inet_ntoa(answer[20:24])
    return "127.0.0.1"


def _check_version(found: str) -> None:
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if numbers < OLDEST:
        needed = ".".join(map(str, OLDEST))
        reason = f"version {found or 'unknown'} of its engine, needs {needed} or later: {INSTALL}"
        raise UsageError("connector", "mooncake", reason)


def installed_version() -> str:
    """'' where neither package is there."""
    for name in PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def _shorten_accept(port: int) -> None:
    """Have the engine's listener look up more often whether it is to end. Where the socket is not
    found, the engine's end takes up to a second."""
    listener = _listener(port)
    if listener is None:
        return
    seconds, micros = divmod(round(_ACCEPT_TIMEOUT_S * 1e6), 1_000_000)
    with listener:
        timeout = struct.pack("@ll", seconds, micros)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    try:  # ends the accept that began with the old timeout
        socket.create_connection(("127.0.0.1", port), timeout=_DIAL_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectorError(
            f"Mooncake's engine does not listen at port {port}: {error}"
        ) from error


def _listener(port: int) -> socket.socket | None:
    """A second descriptor of this process's socket that listens at `port`."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed meanwhile
            continue
        if found.family in (socket.AF_INET, socket.AF_INET6) and _listens_at(found, port):
            return found
        found.close()
    return None


def _listens_at(found: socket.socket, port: int) -> bool:
    is_stream = found.type == socket.SOCK_STREAM
    return (
        is_stream
        and found.getsockname()[1] == port
        and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    )
