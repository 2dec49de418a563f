"""What NIXL and UCX are told through the environment, and why. Imports neither.

Facts (nixl 1.5.1 with UCX 1.23; those of the connector's file beside):
- UCX reads most of its variables when an agent is made, some (logging, UCX_MODULES) when its
  library is loaded. UCX_TLS set between the two is obeyed (the tests of stopped peers rely on it).
- PyPI's nixl comes as nixl_cu12 and nixl_cu13, each with a UCX of its own beside the module; its
  libraries show in /proc/self/maps as libucp-….so.
- An agent's metadata has the addresses of all interfaces that UCX_NET_DEVICES allows. UCX at the
  other end takes the first whose subnet it has too (by name, where they seem equally fast), whether
  or not anything gets through: with a network between two hosts that leads nowhere,
  add_remote_agent waits 4 s and fails with NIXL_ERR_BACKEND, or a transfer never ends.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from kvxfer.errors import UsageError
from kvxfer.transfer.connector import DATA_ADDRESS, Where
from kvxfer.transfer.interfaces import interface_addresses

logger = logging.getLogger(__name__)

PROGRESS_THREAD = "KVXFER_NIXL_PROGRESS_THREAD"
"""Environment variable: 1 or 0 overrides the rule of `progress_thread_setting`."""

BACKEND = "KVXFER_NIXL_BACKEND"
"""Environment variable: the NIXL plugin that moves KV, UCX by default. Others are there to be
measured (`kvxfer bench connectors --backend`): all that is known here is known of UCX."""

NET_DEVICES = "UCX_NET_DEVICES"

CORES_TO_SPARE = 8

_TCP_ALONE = {"tcp", "self", "cuda_copy", "rocm_copy"}
"""Transports of UCX among which nothing but TCP reaches another process."""
_RDMA = Path("/sys/class/infiniband")
_LIVENESS = "a cut link is noticed within about 10 s, by default never; a blip of 1.5 s is survived"
_WANTED = (
    (
        "UCX_RMA_PPLN_ENABLE",
        "y",
        "growable GPU memory on one host moves at 0.5 GB/s without, at 250-300 with",
    ),
    ("UCX_TCP_USER_TIMEOUT", "10s", _LIVENESS),
    ("UCX_TCP_KEEPIDLE", "2s", _LIVENESS),
    ("UCX_TCP_KEEPINTVL", "2s", _LIVENESS),
    ("UCX_TCP_KEEPCNT", "4", _LIVENESS),
    ("UCX_LOG_LEVEL", "fatal", "errors are reported by us; UCX prints them to stderr too"),
    ("NIXL_LOG_LEVEL", "FATAL", "errors are reported by us; NIXL prints them to stderr too"),
)
_ONE_NETWORK = "UCX takes a network that both hosts have, also one that leads nowhere"
_WANTED_WITHOUT_RDMA = (
    (
        "UCX_MODULES",
        "^ib",
        "no RDMA device here, and with libibverbs installed the process would end with SIGSEGV",
    ),
)

Source = Literal["user", "kvxfer"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A variable, the value that is in force, who chose it, and what kvxfer wants it for."""

    name: str
    value: str
    source: Source
    reason: str
    wanted: str
    """What kvxfer would choose."""


def environment_plan(
    environ: Mapping[str, str], has_rdma: bool, interfaces: Mapping[str, str] = MappingProxyType({})
) -> list[Setting]:
    """Every variable that kvxfer sets before NIXL starts; the user's own values stand. `interfaces`
    are this host's by address: without RDMA, whose devices it is not for us to choose, UCX gets the
    one by which others dial us. Pure."""
    wanted = _WANTED if has_rdma else (*_WANTED, *_WANTED_WITHOUT_RDMA)
    plan = [_setting(environ, name, value, reason) for name, value, reason in wanted]
    device = interfaces.get(environ.get(DATA_ADDRESS, ""), "")
    if NET_DEVICES in environ or (device and not has_rdma):
        plan.append(_setting(environ, NET_DEVICES, device, _ONE_NETWORK))
    return plan


def progress_thread_setting(environ: Mapping[str, str], num_cores: int) -> Setting:
    """'1' from 8 usable cores up, since the thread spins on one; the environment overrides. Pure.

    Raises UsageError for a value that is neither 0 nor 1.
    """
    choice = environ.get(PROGRESS_THREAD, "")
    if choice not in ("", "0", "1"):
        raise UsageError(PROGRESS_THREAD, choice, "must be 0 or 1")
    wanted = "1" if num_cores >= CORES_TO_SPARE else "0"
    reason = (
        f"it spins on one core: on from {CORES_TO_SPARE} usable cores up, and here are {num_cores}"
    )
    return Setting(
        PROGRESS_THREAD, choice or wanted, "user" if choice else "kvxfer", reason, wanted
    )


def prepare_environment() -> None:
    """Set what the user has not set. One line of warning where NIXL is in the process already and
    may have started without it."""
    plan = environment_plan(os.environ, has_rdma(), interface_addresses())
    settings = [one for one in plan if one.source == "kvxfer"]
    for setting in settings:
        os.environ[setting.name] = setting.value
        if setting.name == NET_DEVICES:
            address = os.environ[DATA_ADDRESS]
            logger.info("between hosts NIXL goes by %s, which has %s", setting.value, address)
    late = late_warning(settings, already_loaded(sys.modules, _mapped_files()))
    if late:
        logger.warning("%s", late)


def late_warning(settings: Iterable[Setting], loaded: str) -> str:
    """What to say where `loaded` was in the process before `settings` could be made, or ''."""
    missed = " ".join(f"{one.name}={one.value}" for one in settings)
    if not loaded or not missed:
        return ""
    return (
        f"{loaded} was loaded before kvxfer, so agents that exist by now lack, and later ones may "
        f"lack: {missed}; set these before the process starts, or open kvxfer's connector first"
    )


def already_loaded(modules: Iterable[str], mapped_files: str) -> str:
    """What of NIXL or UCX is in this process, or ''."""
    found = {"nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm"}.intersection(modules)
    if found:
        return f"the module {min(found)}"
    return "UCX (libucp)" if "/libucp" in mapped_files else ""


def network_hint(environ: Mapping[str, str]) -> str:
    """What to look at where a peer on another host cannot be reached. Pure."""
    devices = environ.get(NET_DEVICES, "") or "all"
    return f"do {NET_DEVICES} of both ({devices} here) name one network, and may its ports pass?"


def backend() -> str:
    """The NIXL plugin that this process's agents are to use."""
    return os.environ.get(BACKEND, "") or "UCX"


def wants_progress_thread() -> bool:
    """What `progress_thread_setting` comes to in this process."""
    return progress_thread_setting(os.environ, usable_cores()).value == "1"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def has_rdma() -> bool:
    return _RDMA.is_dir() and any(_RDMA.iterdir())


def reads_from(environ: Mapping[str, str], has_rdma: bool) -> frozenset[Where]:
    """As `Connector.reads_from`: UCX emulates reads over TCP. Pure."""
    transports = {one.strip() for one in environ.get("UCX_TLS", "all").split(",")}
    if transports <= _TCP_ALONE:
        return frozenset()
    return frozenset(Where) if has_rdma else frozenset({Where.HOST})


def may_read(where: Where) -> bool:
    """Whether a read of memory there is no work of its owner's: in this process, now."""
    return where in reads_from(os.environ, has_rdma())


def _setting(environ: Mapping[str, str], name: str, wanted: str, reason: str) -> Setting:
    if name in environ:
        return Setting(name, environ[name], "user", reason, wanted)
    return Setting(name, wanted, "kvxfer", reason, wanted)


def _mapped_files() -> str:
    return Path("/proc/self/maps").read_text()
