"""The host: memory, cores, limits, namespaces.

Facts (Linux; proc(5), namespaces(7), process_vm_readv(2), measured where numbers stand):
- A chunk of a host cache is one memfd: one open file and one mapping. `kvxfer` raises the soft
  limit of open files as far as the hard one allows.
- process_vm_readv, by which NIXL moves host memory on one host, needs the permission to ptrace:
  with yama's ptrace_scope of 1 or more, CAP_SYS_PTRACE or being an ancestor.
- /proc/self/ns/NAME is a link whose text names the namespace; the initial ones have fixed numbers.
"""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path

from kvxfer.doctor.network import has_rdma_device
from kvxfer.errors import KvxferError
from kvxfer.memory.host import HostDriver
from kvxfer.memory.limits import HostMemory
from kvxfer.telemetry.checks import Check
from kvxfer.transfer.ceilings import measure_memcpy

GIB = 1 << 30
_FEW_FILES = 4096
_FEW_MAPPINGS = 65530
_LITTLE_SHARED_MEMORY = 64 << 20
_CAP_SYS_PTRACE = 19
_INITIAL_NAMESPACES = {"pid": 4026531836, "ipc": 4026531839, "user": 4026531837}


def memory_checks(proc: Path = Path("/proc")) -> list[Check]:
    """Physical memory that this process may take, cgroups included."""
    found = HostMemory(proc).measure()
    share = found.free_bytes / max(found.total_bytes, 1)
    value = f"{found.free_bytes / GIB:.1f} GiB free of {found.total_bytes / GIB:.1f}"
    hint = "host caches and model weights share it: give --kv-cache-memory-bytes"
    return [Check("host memory", "ok", value) if share > 0.1 else
            Check("host memory", "warn", value, hint)]  # fmt: skip


def core_checks(usable: int, present: int) -> list[Check]:
    """Cores that this process may run on, and those of the machine."""
    value = f"{usable} usable of {present}"
    if usable >= 4:
        return [Check("cores", "ok", value)]
    hint = "a worker has three threads: fewer than 4 cores a worker slow transfers down"
    return [Check("cores", "warn", value, hint)]


def limit_checks(
    open_files: tuple[int, int], locked_bytes: int, proc: Path, has_rdma: bool = False
) -> list[Check]:
    """`open_files` is (soft, hard); `resource.RLIM_INFINITY` is no limit."""
    soft, hard = open_files
    value = f"{_number(soft)}, at most {_number(hard)}"
    few = hard != resource.RLIM_INFINITY and hard < _FEW_FILES
    hint = f"a chunk of a cache takes one, a client too: raise the hard limit to {_FEW_FILES}"
    checks = [Check("open files", "warn", value, hint) if few else Check("open files", "ok", value)]
    checks.append(_locked_check(locked_bytes, has_rdma))
    mappings = int((proc / "sys/vm/max_map_count").read_text())
    if mappings < _FEW_MAPPINGS:
        hint = (
            f"chunks and mappings of peers take one each: sysctl vm.max_map_count={_FEW_MAPPINGS}"
        )
        checks.append(Check("mappings", "warn", str(mappings), hint))
    else:
        checks.append(Check("mappings", "ok", str(mappings)))
    return checks


def _locked_check(locked_bytes: int, has_rdma: bool) -> Check:
    """A cache that is registered with an RDMA card is pinned, all that is committed of it."""
    value = _number(locked_bytes)
    if has_rdma and locked_bytes != resource.RLIM_INFINITY:
        hint = "registering a cache with the RDMA card fails beyond it: ulimit -l unlimited"
        return Check("locked memory", "warn", value, hint)
    return Check("locked memory", "ok", value, "RDMA pins: it wants no limit there")


def _number(limit: int) -> str:
    return "no limit" if limit == resource.RLIM_INFINITY else str(limit)


def shared_memory_checks(path: Path) -> list[Check]:
    """What torch's and NCCL's processes share of; our caches do not live there."""
    try:
        found = os.statvfs(path)
    except OSError as error:
        hint = "NCCL, between the ranks of a worker, wants it: mount a tmpfs there"
        return [Check(str(path), "warn", error.strerror or str(error), hint)]
    free = found.f_bavail * found.f_frsize
    value = f"{free / GIB:.2f} GiB free"
    if free >= _LITTLE_SHARED_MEMORY:
        return [Check(str(path), "ok", value)]
    return [Check(str(path), "warn", value, "NCCL may fail: docker run --shm-size=1g")]


def virtual_memory_checks() -> list[Check]:
    """Reserve, back, hand out, map again and give back one granule of host memory."""
    driver = HostDriver()
    size = driver.granularity
    try:
        base = driver.reserve(2 * size)
        handle = driver.commit(base, size)
        fd = driver.export(handle)
        try:
            imported = driver.import_(fd, base + size, size)
        finally:
            os.close(fd)
        driver.decommit(base + size, size, imported)
        driver.decommit(base, size, handle)
        driver.free(base, 2 * size)
    except KvxferError as error:
        hint = "growable host caches do not work here: is memfd_create allowed?"
        return [Check("growable host memory", "fail", str(error), hint)]
    text = f"memfd chunks, granularity {size // 1024} KiB, exported and mapped again"
    return [Check("growable host memory", "ok", text)]


def ceiling_checks() -> list[Check]:
    """What one thread copies of host memory."""
    gbps = measure_memcpy()
    return [Check("memcpy, one thread", "ok", f"{gbps:.1f} GB/s", "the ceiling of host lanes")]


def attach_checks(proc: Path) -> list[Check]:
    """Whether NIXL can move host memory between processes of this host without TCP."""
    try:
        scope = int((proc / "sys/kernel/yama/ptrace_scope").read_text())
    except FileNotFoundError:
        scope = 0
    status = (proc / "self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    is_capable = bool(capabilities >> _CAP_SYS_PTRACE & 1)
    value = f"ptrace_scope {scope}, {'with' if is_capable else 'without'} CAP_SYS_PTRACE"
    if scope == 0 or is_capable:
        return [Check("cross-memory attach", "ok", value, "within one PID namespace and user")]
    hint = "NIXL falls back to TCP on one host: use peer, or sysctl kernel.yama.ptrace_scope=0"
    return [Check("cross-memory attach", "warn", value, hint)]


def namespace_checks(proc: Path) -> list[Check]:
    """Which namespaces are not the host's own, as in a container."""
    own = []
    for name, initial in _INITIAL_NAMESPACES.items():
        link = (proc / "self/ns" / name).readlink()
        if str(link) != f"{name}:[{initial}]":
            own.append(name)
    if not own:
        return [Check("namespaces", "ok", "the host's")]
    hint = (
        "workers in other PID namespaces reach each other by peer (shared socket directory) or TCP"
    )
    return [Check("namespaces", "ok", f"own {', '.join(own)}", hint)]


def machine(proc: Path = Path("/proc")) -> list[Check]:
    return [
        Check("kernel", "ok", f"{platform.system()} {platform.release()} {platform.machine()}"),
        *memory_checks(proc),
        *core_checks(len(os.sched_getaffinity(0)), os.cpu_count() or 1),
        *limit_checks(
            resource.getrlimit(resource.RLIMIT_NOFILE),
            resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            proc,
            has_rdma_device(),
        ),
        *shared_memory_checks(Path("/dev/shm")),
        *virtual_memory_checks(),
        *ceiling_checks(),
        *attach_checks(proc),
        *namespace_checks(proc),
    ]
