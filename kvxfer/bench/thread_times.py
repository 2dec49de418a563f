"""CPU time of a worker's threads, by what they are for.

Facts (Linux 6, Python 3.11): /proc/PID/task has a directory for each thread; the first number of
its `schedstat` is the nanoseconds that it has run for. The control thread is the main one, whose id
is the process's; those of ZeroMQ are named ZMQbg/…; Python gives its own no names that show there.
"""

from __future__ import annotations

from pathlib import Path

KINDS = ("control", "sockets", "work")
"""The control thread; ZeroMQ's; model and transfer, with whatever else there is."""


def thread_times(pid: int) -> dict[str, int]:
    """Nanoseconds so far, by kind. Raises OSError for a process that is over."""
    found = dict.fromkeys(KINDS, 0)
    for task in Path(f"/proc/{pid}/task").iterdir():
        ran_ns = int((task / "schedstat").read_text().split()[0])
        found[_kind(task, pid)] += ran_ns
    return found


def _kind(task: Path, pid: int) -> str:
    if task.name == str(pid):
        return "control"
    return "sockets" if (task / "comm").read_text().startswith("ZMQ") else "work"
