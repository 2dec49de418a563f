"""Network interfaces and InfiniBand devices, as sysfs shows them.

Facts (Linux's sysfs documentation): `speed` is in Mbit/s; reading it fails (EINVAL) for an
interface that is down or has none, and says -1 or 0 for a virtual one that knows none.
"""

from __future__ import annotations

from pathlib import Path

from kvxfer.telemetry.checks import Check

_SLOW_MBITS = 10_000


def network_checks(sysfs: Path = Path("/sys")) -> list[Check]:
    """Every interface but the loopback one, then every InfiniBand port."""
    directory = sysfs / "class/net"
    names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
    checks = [_interface(directory / name) for name in names if name != "lo"]
    if not checks:
        checks = [Check("network", "warn", "no interface but lo", "only workers of this host can be reached")]  # fmt: skip # noqa: E501
    return [*checks, *_infiniband(sysfs / "class/infiniband")]


def has_rdma_device(sysfs: Path = Path("/sys")) -> bool:
    directory = sysfs / "class/infiniband"
    return directory.is_dir() and any(directory.iterdir())


def _interface(path: Path) -> Check:
    state = _text(path / "operstate") or "unknown"
    mbits = int(_text(path / "speed") or -1)
    name = f"interface {path.name}"
    if state == "down":
        return Check(name, "ok", "down")
    if mbits <= 0:
        return Check(name, "ok", f"{state}, speed unknown", "virtual: measure it with `iperf3`")
    value = f"{state}, {mbits / 1000:g} Gbit/s ({mbits / 8000:.2f} GB/s at best)"
    if mbits >= _SLOW_MBITS:
        return Check(name, "ok", value)
    return Check(name, "warn", value, "between hosts, this is the ceiling of a hand-over")


def _infiniband(directory: Path) -> list[Check]:
    devices = sorted(directory.iterdir()) if directory.is_dir() else []
    if not devices:
        return [Check("InfiniBand, RoCE", "ok", "none", "NIXL moves KV between hosts over TCP")]
    checks = []
    for port in (port for device in devices for port in sorted((device / "ports").glob("*"))):
        state, rate = _text(port / "state") or "unknown", _text(port / "rate") or "rate unknown"
        name = f"RDMA {port.parent.parent.name}/{port.name}"
        if "ACTIVE" in state:
            checks.append(Check(name, "ok", f"{state}, {rate}"))
        else:
            hint = "NIXL will not use it: check the cable and the subnet manager"
            checks.append(Check(name, "warn", f"{state}, {rate}", hint))
    return checks


def _text(path: Path) -> str:
    """What a file of sysfs says, or '' where it has nothing to say."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
