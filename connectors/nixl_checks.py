"""What NIXL makes of this machine, for `kvxfer doctor`: run as a program, it prints JSON.

In a process of its own, since it loads NIXL and starts an agent.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

import msgspec
import numpy as np

from connectors.nixl_api import load_nixl, translated
from connectors.nixl_environment import (
    NET_DEVICES,
    Setting,
    environment_plan,
    has_rdma,
    progress_thread_setting,
    usable_cores,
)
from kvxfer.errors import KvxferError, UsageError
from kvxfer.telemetry.checks import Check
from kvxfer.transfer.interfaces import interface_addresses

_TRIAL_BYTES = 1 << 20


def setting_checks(environ: Mapping[str, str], rdma: bool, num_cores: int) -> list[Check]:
    """Every variable that NIXL starts with, who chose it, and why. Pure."""
    checks = [_setting_check(one) for one in environment_plan(environ, rdma)]
    try:
        thread = progress_thread_setting(environ, num_cores)
    except UsageError as error:
        return [*checks, Check(error.field, "fail", str(error.value), error.reason)]
    return [*checks, _setting_check(thread)]


def _setting_check(setting: Setting) -> Check:
    by = "set by the user" if setting.source == "user" else "set by kvxfer"
    value = f"{setting.value} ({by})"
    # UCX reads any of y, yes, on and 1 as the same.
    agreed = setting.value == setting.wanted or (
        setting.wanted == "y" and setting.value.lower() in ("yes", "on", "1")
    )
    if agreed or setting.name != "UCX_RMA_PPLN_ENABLE":
        return Check(setting.name, "ok", value, setting.reason)
    return Check(setting.name, "warn", value, f"unset it: {setting.reason}")


def network_checks(
    environ: Mapping[str, str], rdma: bool, interfaces: Mapping[str, str]
) -> list[Check]:
    """Which networks UCX may take between hosts; `interfaces` are this host's by address. Pure."""
    label = "NIXL between hosts"
    reached = {
        f"{name} {address}"
        for address, name in interfaces.items()
        if name != "lo" and not address.startswith("fe80:")
    }
    listed = ", ".join(sorted(reached)) or "no network but lo"
    named = [one for one in environ.get(NET_DEVICES, "").split(",") if one not in ("", "all")]
    missing = [one for one in named if not rdma and one not in interfaces.values()]
    if missing:
        hint = f"{NET_DEVICES} names no interface of this host: {listed}"
        return [Check(label, "fail", ", ".join(missing), hint)]
    if named:
        return [Check(label, "ok", ", ".join(named), f"as {NET_DEVICES} says")]
    if rdma:
        hint = f"name the RDMA devices and the interface that peers reach: {NET_DEVICES}=mlx5_0:1,…"
        return [Check(label, "ok", f"RDMA devices; {listed}", hint)]
    hint = f"a worker takes that of the address that others dial; {NET_DEVICES} names another"
    return [Check(label, "ok", listed, hint)]


def trial_checks() -> list[Check]:
    """Load NIXL, start an agent and register a little host memory."""
    from connectors.nixl import NixlAgent
    from kvxfer.transfer.connector import MemoryWindow
    from kvxfer.transfer.regions import Region

    start_s = time.monotonic()
    memory = np.zeros(_TRIAL_BYTES, dtype=np.uint8)
    window = MemoryWindow(int(memory.ctypes.data), _TRIAL_BYTES, "cpu")
    try:
        agent = NixlAgent(f"doctor-{os.getpid()}", window)
        handle = agent.register(Region(0, _TRIAL_BYTES))
        agent.metadata([Region(0, _TRIAL_BYTES)])
        agent.deregister(handle)
    except KvxferError as error:
        hint = "NIXL does not work here: pip install --force-reinstall nixl==1.5.1"
        return [Check("connector nixl", "fail", str(error), hint)]
    text = f"UCX plugin there, an agent started in {time.monotonic() - start_s:.1f} s"
    return [Check("connector nixl", "ok", text, "any host, any memory")]


def plugin_checks() -> list[Check]:
    """Which of NIXL's plugins are installed; UCX is the one that moves KV here."""
    api = load_nixl()
    try:
        with translated("get_plugin_list"):
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            names = api.nixl_agent(f"doctor-plugins-{os.getpid()}", config).get_plugin_list()
    except KvxferError as error:
        return [Check("NIXL plugins", "warn", str(error), "is nixl installed as a whole?")]
    if "UCX" in names:
        return [Check("NIXL plugins", "ok", ", ".join(sorted(names)), "kvxfer uses UCX")]
    hint = "without UCX KV moves by peer only, within one host: reinstall nixl"
    return [Check("NIXL plugins", "fail", ", ".join(sorted(names)) or "none", hint)]


def checks() -> list[Check]:
    network = network_checks(os.environ, has_rdma(), interface_addresses())
    settings = [*network, *setting_checks(os.environ, has_rdma(), usable_cores())]
    if any(check.status == "fail" for check in settings):
        return settings
    return [*trial_checks(), *plugin_checks(), *settings]


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(checks()))
