"""A real Ray cluster of several nodes on this host, which notices within seconds that one died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.commands import ROOT

HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
"""Ray's own would see a dead node after 15 s. One that is only slow to answer is no dead one."""
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}
QUESTION = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(ray.available_resources().get("CPU", 0), ray.cluster_resources().get("CPU", 0))
"""


class RayNodes:
    """A context. Nodes of two CPUs each; the first one is the head."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> RayNodes:
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        handler = signal.getsignal(signal.SIGTERM)
        head: dict[str, Any] = {**NODE, "include_dashboard": False, "_system_config": HEALTH}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(self._count - 1):
            self.add()
        signal.signal(signal.SIGTERM, handler)
        return self

    def __exit__(self, *exception: object) -> None:
        self._cluster.shutdown()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self) -> None:
        self._cluster.add_node(**NODE)

    def raylet_of(self, pid: int) -> int:
        """The raylet above a process."""
        while pid > 1:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"/raylet/raylet" in command.split(b"\0")[0]:
                return pid
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        raise AssertionError("no raylet is above it")

    def kill_node_of(self, pid: int) -> None:
        """The node that a process runs on dies, and all that runs there."""
        raylet = self.raylet_of(pid)
        for node in self._cluster.list_all_nodes():
            processes = node.all_processes.get("raylet", [])
            if any(one.process.pid == raylet for one in processes):
                assert not node.head
                self._cluster.remove_node(node, allow_graceful=False)
                return
        raise AssertionError("no node has this raylet")

    def is_on_head(self, pid: int) -> bool:
        raylet = self.raylet_of(pid)
        found = self._cluster.head_node.all_processes.get("raylet", [])
        return any(one.process.pid == raylet for one in found)

    def free_cpus(self) -> tuple[float, float]:
        """CPUs that nobody has reserved, and all, as another driver is told."""
        done = subprocess.run(
            [sys.executable, "-c", QUESTION, self.address], cwd=ROOT, capture_output=True,
            text=True, timeout=60, check=True,
        )  # fmt: skip
        free, every = done.stdout.split()
        return float(free), float(every)


def actors() -> list[int]:
    """Processes of ours on any node."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            with suppress(OSError):
                if (path / "cmdline").read_bytes().startswith(b"ray::_Actor"):
                    found.append(int(path.name))
    return found
