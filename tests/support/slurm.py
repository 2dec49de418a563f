"""A Slurm cluster of this host alone: its own controller, and a slurmd for each of several nodes.

Facts (Slurm 22.05 of Debian 12): several slurmd of one host are told apart by -N and their ports;
auth/none and cred/none need no munge, and are for tests only; without a cgroup plug-in nothing of
the host is touched. The nodes share the host's addresses.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

from support.processes import Processes
from support.service_processes import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
TIMEOUT_S = 60.0


def missing() -> str:
    """Why there can be none, or ''."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)}: not here: apt-get install slurmctld slurmd slurm-client"
    return "" if os.geteuid() == 0 else "slurmd runs as root"


class SlurmCluster:
    """A context."""

    def __init__(self, root: Path, num_nodes: int) -> None:
        self._root = root
        self.nodes = [f"host{index}" for index in range(1, num_nodes + 1)]
        self._conf = root / "slurm.conf"
        self._processes = Processes(root)

    def __enter__(self) -> SlurmCluster:
        (self._root / "state").mkdir()
        self._conf.write_text(self._configuration())
        self._processes.start("slurmctld", ["slurmctld", "-D", "-c", "-f", self._conf])
        for node in self.nodes:
            self._processes.start(node, ["slurmd", "-D", "-N", node, "-f", self._conf])
        try:
            self.until(self._is_up, "all nodes are idle")
        except BaseException:
            self._processes.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for job in self.run("squeue", "--noheader", "--format=%A").split():
                self.run("scancel", job)
            self.until(lambda: not self.run("squeue", "--noheader"), "no job is left")
        finally:
            self._processes.__exit__()

    def _configuration(self) -> str:
        host, root = socket.gethostname(), self._root
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1"
            for node in self.nodes
        ]
        return "\n".join([
            "ClusterName=test", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={free_port()}",
            "SlurmUser=root", "AuthType=auth/none", "CredType=cred/none", "MpiDefault=none",
            f"StateSaveLocation={root}/state", f"SlurmdSpoolDir={root}/spool-%n",
            f"SlurmctldPidFile={root}/ctld.pid", f"SlurmdPidFile={root}/slurmd-%n.pid",
            "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "SwitchType=switch/none",
            "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "ReturnToService=2",
            "KillWait=5", *nodes,
            f"PartitionName=all Nodes={','.join(self.nodes)} Default=YES State=UP", "",
        ])  # fmt: skip

    def _is_up(self) -> bool:
        told = self.run("sinfo", "--noheader", "--Node", "--format=%T", fails_well=True)
        return told.split() == ["idle"] * len(self.nodes)

    def run(self, *words: str | Path, fails_well: bool = False, **environment: str) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**os.environ, "SLURM_CONF": str(self._conf), **environment},
        )
        assert fails_well or done.returncode == 0, done
        return done.stdout

    def state(self, job: str) -> str:
        """COMPLETED, FAILED, RUNNING, …"""
        told = self.run("scontrol", "show", "job", job)
        return told.partition("JobState=")[2].split()[0]

    def until(self, condition, what: str, timeout_s: float = TIMEOUT_S) -> None:
        self._processes.until(condition, timeout_s, what)
