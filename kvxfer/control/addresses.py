"""Addresses of the control plane, and which of them need keys: all but loopback and Unix sockets.

Facts (Linux 6.18, ZeroMQ 4.3.5): a Unix socket with a path is reached across network namespaces,
by whoever may open the path; an abstract one ('@name') is not, and has no owner. `sun_path` holds
107 bytes and a NUL. A ZeroMQ socket that binds takes away whatever file lies at its path, a live
server's socket too, and leaves its own behind when it closes. One that dials a path that is not
there yet tries again and again.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
import stat
from pathlib import Path

from kvxfer.errors import UsageError

logger = logging.getLogger(__name__)

IPC = "ipc://"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
LONGEST_PATH_BYTES = 107
PROBE_TIMEOUT_S = 1.0
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of a key: the stem of its files."""
HOST_NAME = re.compile(
    r"(?=.{1,253}$)([A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9])?\.)*[A-Za-z]([A-Za-z0-9-]*)"
)
"""Ends in a letter's label, so that no other way to write an IP address ('0', '0x7f.1') is one."""


def split_name(address: str) -> tuple[str, str]:
    """'ADDRESS#NAME', NAME being that of whose key belongs there, else ''."""
    plain, mark, name = address.rpartition("#")
    return (plain, name) if mark and KEY_NAME.fullmatch(name) else (address, "")


def check_address(
    field: str,
    address: str,
    *,
    has_keys: bool = False,
    binds: bool = False,
    is_advertised: bool = False,
) -> None:
    """Without keys nothing but this host may be talked to: by TCP on loopback, or by a Unix socket
    in a directory that is ours alone. With them, any host. Never a wildcard, which tells others
    nothing, but to bind where another address `is_advertised`. Raises UsageError."""
    if address.startswith(IPC):
        _check_path(field, address)
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    is_port = port.isascii() and port.isdecimal() and int(port) < 1 << 16
    if not address.startswith("tcp://") or not is_port:
        raise UsageError(
            field, address, "must look like tcp://127.0.0.1:PORT (0: any free port) or ipc:///PATH"
        )
    if host in LOOPBACK:
        return
    ip = _ip(host)
    if host == "*" or (ip is not None and (ip.is_unspecified or ip.is_multicast)):
        if not (binds and has_keys and is_advertised) or (ip is not None and ip.is_multicast):
            hint = "give it an address" + ", or keys and advertise" * binds
            raise UsageError(field, address, f"names no host that others could dial: {hint}")
        return
    if not has_keys:
        reason = "only loopback addresses are allowed without keys (key_file, peer_keys)"
        raise UsageError(field, address, reason)
    if ip is None and (binds or not HOST_NAME.fullmatch(host)):
        wanted = "an IP address of this host" if binds else "an IP address or a host's name"
        raise UsageError(field, address, f"{host!r} is not {wanted}")


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for what is no IP address; an IPv6 one stands in brackets."""
    is_bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.ip_address(host[1:-1] if is_bracketed else host)
    except ValueError:
        return None
    if is_bracketed != (ip.version == 6):
        return None
    return getattr(ip, "ipv4_mapped", None) or ip


def check_advertised(advertise: str, listen: str, has_keys: bool) -> None:
    """What others are to dial instead of `listen`. Raises UsageError."""
    if listen.startswith(IPC) or advertise.startswith(IPC):
        raise UsageError("advertise", advertise, "is for TCP: a Unix socket has one path")
    plain, name = split_name(advertise)
    if name:
        raise UsageError("advertise", advertise, "is told without #NAME: that of our key is added")
    check_address("advertise", plain, has_keys=has_keys)


def with_port(advertise: str, bound: str) -> str:
    """`advertise` with the port of `bound` where its own is 0."""
    host, _, port = advertise.rpartition(":")
    return f"{host}:{bound.rpartition(':')[2] if int(port) == 0 else port}"


def ip_for_others(address: str) -> str:
    """The IP address in it, bare; '' for loopback, wildcards, names and Unix sockets."""
    if address.startswith(IPC):
        return ""
    host = split_name(address)[0].removeprefix("tcp://").rpartition(":")[0]
    ip = _ip(host)
    return "" if ip is None or ip.is_loopback or ip.is_unspecified else str(ip)


def _check_path(field: str, address: str) -> None:
    """A path that fits, in a directory that no other user can reach into."""
    text = address.removeprefix(IPC)
    if not text.startswith("/") or text.endswith("/") or not text.isprintable():
        raise UsageError(field, address, "must look like ipc:///PATH, the absolute path of a file")
    size = len(os.fsencode(text))
    if size > LONGEST_PATH_BYTES:
        reason = f"a path of {size} bytes; a socket's has {LONGEST_PATH_BYTES} at the most"
        raise UsageError(field, address, reason)
    directory = Path(text).parent
    try:
        found = directory.stat()
    except OSError as error:
        raise UsageError(field, address, f"{directory}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(field, address, f"{directory} is no directory")
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid() or mode & 0o077:
        raise UsageError(
            field,
            address,
            f"{directory} must be yours alone (mode 0700); it is user {found.st_uid}'s, {mode:04o}",
        )


def check_free(field: str, address: str) -> None:
    """Raise UsageError where binding `address`, which was checked, would take a file away that is
    no socket, or one that somebody listens on. A socket left behind may go."""
    if not address.startswith(IPC):
        return  # the kernel refuses
    path = Path(address.removeprefix(IPC))
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(field, address, f"cannot bind: {error.strerror}") from error
    if not stat.S_ISSOCK(kind):
        raise UsageError(field, address, "cannot bind: a file that is no socket is in the way")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:  # a queue that is full, say: somebody has it
            raise UsageError(field, address, f"cannot bind: in use ({error})") from error
    raise UsageError(field, address, "cannot bind: in use")


class SocketFile:
    """The file of the Unix socket that was bound at `address`; nothing for other addresses."""

    def __init__(self, address: str) -> None:
        """Lets nobody but this user open it. Raises OSError."""
        self._path = Path(address.removeprefix(IPC)) if address.startswith(IPC) else None
        self._inode = 0
        if self._path is not None:
            self._path.chmod(0o600)
            self._inode = self._path.lstat().st_ino

    def remove(self) -> None:
        """To be called while the socket still listens: nobody else has bound the path then, and a
        file of another inode is not ours. Idempotent."""
        if self._path is None:
            return
        path, self._path = self._path, None
        try:
            if path.lstat().st_ino == self._inode:
                path.unlink()
        except FileNotFoundError:
            return  # its directory was taken away
        except OSError as error:
            logger.warning("a socket's file stays behind: %s", error)
