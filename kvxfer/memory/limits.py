"""What the operating system lets this process have: physical memory and open files.

Facts (Linux 6.18 with cgroup v1, and the kernel's documentation for v2):
- MemAvailable is the kernel's own estimate of what can be taken without swapping; it knows nothing
  of cgroups. A cgroup's page cache counts as used, though its inactive part is given up first.
- Every ancestor's limit binds as well; the smallest remainder is what a process may still take.
- v1 says 'no limit' with a huge number, v2 with the word 'max'; the root of v2 has no limit file.
- A container sees its own cgroup as the root of the mount, or (without a cgroup namespace) a path
  that the mount's root field in mountinfo has to be taken off of.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from kvxfer.errors import UsageError
from kvxfer.memory.driver import MemoryInfo

OPEN_FILES_MARGIN = 128
"""Descriptors beyond what is open and asked for: sockets, event files, libraries."""


@dataclass(frozen=True, slots=True)
class _Files:
    """What a cgroup version calls its limit, its usage and its reclaimable bytes."""

    limit: str
    usage: str
    reclaimable: str


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True, slots=True)
class _Level:
    """One cgroup that bounds this process."""

    directory: Path
    files: _Files

    def measure(self, host_bytes: int) -> MemoryInfo | None:
        """What is left under this level's limit; None where it allows all `host_bytes`."""
        try:
            text = (self.directory / self.files.limit).read_text().strip()
            limit = host_bytes if text == "max" else int(text)
            if limit >= host_bytes:
                return None
            usage = int((self.directory / self.files.usage).read_text())
            stat = _key_values((self.directory / "memory.stat").read_text())
        except FileNotFoundError:
            return None
        return MemoryInfo(limit - usage + stat.get(self.files.reclaimable, 0), limit)


class HostMemory:
    """Measures what this process may take of the host's memory, cgroup limits included.

    Which cgroups bound the process is looked up once; their limits and usage at each `measure()`.
    `proc` is where procfs is mounted.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._meminfo = proc / "meminfo"
        self._levels = _levels(proc)

    def measure(self) -> MemoryInfo:
        kibibytes = _key_values(self._meminfo.read_text())
        free = kibibytes["MemAvailable"] * 1024
        total = host_bytes = kibibytes["MemTotal"] * 1024
        for level in self._levels:
            bound = level.measure(host_bytes)
            if bound is not None:
                free = min(free, bound.free_bytes)
                total = min(total, bound.total_bytes)
        return MemoryInfo(max(free, 0), total)


def ensure_open_files(needed: int, welcome: int = 0) -> None:
    """Make room for `needed` more file descriptors by raising the soft limit as far as required,
    and for `welcome` beside them as far as the hard limit goes.

    Raises UsageError when the hard limit does not allow what is needed. Never lowers a limit.
    """
    in_use = sum(1 for _ in Path("/proc/self/fd").iterdir())
    required = in_use + needed + OPEN_FILES_MARGIN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= required + welcome:
        return
    if hard != resource.RLIM_INFINITY and hard < required:
        raise UsageError(
            "open files (RLIMIT_NOFILE)",
            hard,
            f"{required} are needed, one per chunk of the cache and some beside; raise the hard "
            f"limit (`ulimit -Hn {required}`, LimitNOFILE= of the service, or the container's "
            "nofile ulimit), or choose a larger granularity or a smaller cache",
        )
    wanted = required + welcome
    if hard != resource.RLIM_INFINITY:
        wanted = max(soft, min(wanted, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _levels(proc: Path) -> tuple[_Level, ...]:
    """Every cgroup between this process and the root of a mount that accounts memory."""
    paths = _own_cgroups((proc / "self/cgroup").read_text())
    levels: list[_Level] = []
    for line in (proc / "self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mount_point = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup2" and "" in paths:
            files, own = _V2, paths[""]
        elif kind == "cgroup" and "memory" in options.split(",") and "memory" in paths:
            files, own = _V1, paths["memory"]
        else:
            continue
        levels += [_Level(path, files) for path in _upwards(Path(mount_point), root, own)]
    return tuple(levels)


def _own_cgroups(text: str) -> dict[str, str]:
    """Controller ('' for v2) to this process's path, from /proc/self/cgroup."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    return paths


def _upwards(mount_point: Path, root: str, own: str) -> list[Path]:
    """The directory of cgroup `own` and its parents, `mount_point` (which shows `root`) last."""
    inside = Path(own).is_relative_to(root) and ".." not in Path(own).parts
    directory = mount_point / Path(own).relative_to(root) if inside else mount_point
    above = directory.parents[: len(directory.parts) - len(mount_point.parts)]
    return [directory, *above]


def _key_values(text: str) -> dict[str, int]:
    """'Key: 12 kB' and 'key 12' lines as a dict."""
    rows = (line.replace(":", " ").split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}


def host_identity() -> str:
    """Names the running kernel: the same in all containers of a host, another after a reboot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
