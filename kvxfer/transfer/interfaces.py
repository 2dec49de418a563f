"""This host's addresses, and the network interfaces that have them.

Facts (netdevice(7), Linux): SIOCGIFCONF lists IPv4 addresses alone, those of interfaces that are
down too, an alias as NAME:ALIAS; an entry of a 64-bit kernel has 40 bytes, the name's 16 first and
then a sockaddr_in. /proc/net/if_inet6 has the IPv6 ones, as 32 hex digits with the name last.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFCONF = 0x8912
_ENTRY_BYTES = 40
_MOST = 1024


def interface_addresses(proc: Path = Path("/proc")) -> dict[str, str]:
    """By address, the interface's name: of the network namespace that this thread is in."""
    return {**_ipv4(), **_ipv6(proc)}


def _ipv4() -> dict[str, str]:
    room = array.array("B", bytes(_MOST * _ENTRY_BYTES))
    asked = struct.pack("iL", len(room), room.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFCONF, asked)
    size: int = struct.unpack("iL", answer)[0]
    found = {}
    for at in range(0, size, _ENTRY_BYTES):
        name = room[at : at + 16].tobytes().partition(b"\0")[0].decode()
        ip = socket.inet_ntoa(room[at + 20 : at + 24].tobytes())
        found[ip] = name.partition(":")[0]
    return found


def _ipv6(proc: Path) -> dict[str, str]:
    try:
        lines = (proc / "net/if_inet6").read_text().splitlines()
    except OSError:
        return {}  # a kernel without IPv6
    rows = [line.split() for line in lines]
    return {str(ipaddress.IPv6Address(int(row[0], 16))): row[-1] for row in rows}
