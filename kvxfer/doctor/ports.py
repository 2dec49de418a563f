"""TCP ports: whether what is listened on by default is free, and how many there are besides.

Facts (ip-sysctl, Linux): a bind to port 0, and each connection that goes out, take a port of
net.ipv4.ip_local_port_range; UCX, under NIXL, listens on such ports, one or more for each agent.
"""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from kvxfer.telemetry.checks import Check

HTTP_PORT = 8000
"""The default of `kvxfer router` and `kvxfer serve`, as of vLLM."""
FEW_PORTS = 4096


def port_checks(proc: Path = Path("/proc"), http_port: int = HTTP_PORT) -> list[Check]:
    return [_free_check(http_port), _range_check(proc)]


def _free_check(port: int) -> Check:
    """Bind it for a moment, as `kvxfer router` would."""
    label = f"port {port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            what = "in use" if taken else error.strerror or str(error)
            hint = "kvxfer router and serve end with an error there: give another --port"
            return Check(label, "warn", what, hint)
    return Check(label, "ok", "free", "HTTP, on 127.0.0.1 unless --host says otherwise")


def _range_check(proc: Path) -> Check:
    label = "ports to choose from"
    try:
        low, high = map(int, (proc / "sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError) as error:
        return Check(label, "warn", f"unknown: {error}", "is /proc/sys readable?")
    value = f"{high - low + 1}, {low}–{high}"
    if high - low + 1 < FEW_PORTS:
        hint = "clients and peers run out of them under load: widen net.ipv4.ip_local_port_range"
        return Check(label, "warn", value, hint)
    return Check(label, "ok", value, "between hosts NIXL listens there: let a firewall pass them")
