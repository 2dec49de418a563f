"""GPUs: what torch sees, what their drivers can do with virtual memory, how they are connected.

Facts: /proc/driver/nvidia/version names the kernel module's version in its first line; a process
in a container sees it where it sees a GPU. /dev/nvidiactl and /dev/kfd are there where NVIDIA's and
AMD's modules are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvxfer.errors import KvxferError
from kvxfer.memory.driver import VmmDriver
from kvxfer.memory.gpu import GpuDriver
from kvxfer.telemetry.checks import Check
from kvxfer.transfer.ceilings import ceiling_between, measure_memcpy

GIB = 1 << 30
_NODES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def has_gpu_node() -> bool:
    return any(node.exists() for node in _NODES)


def driver_version(proc: Path = Path("/proc")) -> str:
    """NVIDIA's kernel module's, or ''."""
    try:
        line = (proc / "driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return ""
    found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", line)
    return found[1] if found else ""


def count_checks(num_devices: int, driver: str, torch_version: str) -> list[Check]:
    """What torch sees, on a machine that has a GPU driver loaded. Pure."""
    if num_devices:
        return [Check("GPUs", "ok", f"{num_devices}, driver {driver or 'unknown'}")]
    hint = f"torch {torch_version} sees none: is it a CPU build, or CUDA_VISIBLE_DEVICES empty?"
    return [Check("GPUs", "warn", "a driver is loaded, but torch sees no GPU", hint)]


def virtual_memory_checks(name: str, driver: VmmDriver | str) -> list[Check]:
    """Of the GPU called `name`; a text instead of a driver says why there is none."""
    label = f"{name} virtual memory"
    if isinstance(driver, str):
        return [Check(label, "warn", driver, "caches there cannot grow: kvxfer uses fixed ones")]
    if not isinstance(driver, GpuDriver):
        return [Check(label, "ok", driver.name)]
    value = f"{driver.kind}, granularity {driver.granularity >> 20} MiB"
    refused = "; ".join(driver.refused)
    if driver.can_export:
        return [Check(label, "ok", value, refused), _protection_check(name, driver)]
    hint = f"chunks cannot be handed to other processes, so no peer lane: {refused}"
    return [Check(label, "warn", value, hint)]


def _protection_check(name: str, driver: GpuDriver) -> Check:
    """Hand a granule out and map it for reading only, as an importer would."""
    label, size = f"{name} imports for reading only", driver.granularity
    known = len(driver.refused)
    try:
        base = driver.reserve(2 * size)
        handle = driver.commit(base, size)
        fd = driver.export(handle)
        try:
            imported = driver.import_(fd, base + size, size, writable=False)
        finally:
            os.close(fd)
        driver.decommit(base + size, size, imported)
        driver.decommit(base, size, handle)
        driver.free(base, 2 * size)
    except KvxferError as error:
        return Check(label, "warn", str(error), "the peer connector will not work here")
    refused = "; ".join(driver.refused[known:])
    if refused:
        return Check(label, "ok", "no", f"an importer could write what it maps: {refused}")
    return Check(label, "ok", "yes")


def topology_checks(names: list[str], reach: list[list[bool]]) -> list[Check]:
    """`reach[i][j]`: GPU i can access GPU j's memory directly. Pure."""
    checks = []
    for first in range(len(names)):
        for second in range(first + 1, len(names)):
            label = f"cuda:{first} – cuda:{second}"
            if not (reach[first][second] and reach[second][first]):
                hint = "KV between them goes through host memory: see `nvidia-smi topo -m`"
                checks.append(Check(label, "warn", "no direct access", hint))
                continue
            known = ceiling_between(f"{names[first]} 0", f"{names[second]} 1", True, measure_memcpy)
            ceiling = f"{known.gbps:g} GB/s: {known.source}" if known else "ceiling unknown"
            checks.append(Check(label, "ok", "direct access", ceiling))
    return checks


def devices() -> list[Check]:
    if not has_gpu_node():
        return [Check("GPUs", "ok", "none", "workers run on the CPU")]
    import torch

    from kvxfer.worker.device import make_driver

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    checks = count_checks(count, driver_version(), torch.__version__)
    names = [torch.cuda.get_device_name(index) for index in range(count)]
    for index, name in enumerate(names):
        label = f"cuda:{index}"
        try:
            driver = make_driver(label)
            total = torch.cuda.get_device_properties(index).total_memory
            free = "" if isinstance(driver, str) else f"{driver.memory_info().free_bytes / GIB:.1f}"
            memory = f"{name}, {free or '?'} GiB free of {total / GIB:.1f}"
            checks += [Check(label, "ok", memory), *virtual_memory_checks(label, driver)]
        except KvxferError as error:
            checks.append(Check(label, "warn", f"{name}: {error}", "is another process using it?"))
    reach = [
        [one == other or torch.cuda.can_device_access_peer(one, other) for other in range(count)]
        for one in range(count)
    ]
    return [*checks, *topology_checks(names, reach)]
