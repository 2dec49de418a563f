"""`kvxfer doctor`: every section by itself, and the command as a user runs it."""

from __future__ import annotations

import io
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from connectors.nixl_checks import network_checks as nixl_networks
from connectors.nixl_checks import setting_checks
from connectors.peer_checks import checks as peer_checks
from kvxfer.doctor.connectors import connector_checks, read_answer
from kvxfer.doctor.devices import count_checks, driver_version, topology_checks
from kvxfer.doctor.devices import virtual_memory_checks as gpu_memory_checks
from kvxfer.doctor.machine import (
    attach_checks,
    core_checks,
    limit_checks,
    namespace_checks,
    shared_memory_checks,
    virtual_memory_checks,
)
from kvxfer.doctor.network import has_rdma_device, network_checks
from kvxfer.doctor.packages import NAMES, package_checks
from kvxfer.doctor.ports import port_checks
from kvxfer.doctor.run import examine, exit_code
from kvxfer.doctor.screen import show
from kvxfer.errors import DriverError
from kvxfer.memory.gpu import AllocationKind, GpuDriver, HandleTypes
from kvxfer.telemetry.checks import Check


def statuses(checks: list[Check]) -> dict[str, str]:
    assert all(check.hint for check in checks if check.status != "ok"), "no next step is named"
    assert not any("\n" in check.hint for check in checks)
    return {check.name: check.status for check in checks}


def test_packages() -> None:
    every = dict.fromkeys(NAMES, "1.0")
    assert set(statuses(package_checks((3, 12, 1), every, True)).values()) == {"ok"}
    assert statuses(package_checks((3, 10, 0), every, True))["python"] == "fail"
    without = {name: "1" for name in NAMES if name not in ("nixl", "triton")}
    assert statuses(package_checks((3, 11, 0), without, False))["nixl"] == "fail"
    assert statuses(package_checks((3, 11, 0), without, False))["triton"] == "ok"
    assert statuses(package_checks((3, 11, 0), without, True))["triton"] == "warn"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_limits(tmp_path: Path) -> None:
    proc = write(tmp_path, {"sys/vm/max_map_count": "65530\n"})
    good = limit_checks((1024, 1 << 20), resource.RLIM_INFINITY, proc)
    assert set(statuses(good).values()) == {"ok"}
    assert statuses(limit_checks((1024, resource.RLIM_INFINITY), 0, proc))["open files"] == "ok"
    assert statuses(limit_checks((256, 1024), 0, proc))["open files"] == "warn"
    write(tmp_path, {"sys/vm/max_map_count": "1000"})
    assert statuses(limit_checks((1024, 1 << 20), 0, proc))["mappings"] == "warn"


def test_locked_memory_matters_where_there_is_an_rdma_card(tmp_path: Path) -> None:
    proc = write(tmp_path / "proc", {"sys/vm/max_map_count": "65530\n"})
    few, unlimited = 8 << 20, resource.RLIM_INFINITY
    assert statuses(limit_checks((1, 5000), few, proc, True))["locked memory"] == "warn"
    assert statuses(limit_checks((1, 5000), few, proc, False))["locked memory"] == "ok"
    assert statuses(limit_checks((1, 5000), unlimited, proc, True))["locked memory"] == "ok"
    assert not has_rdma_device(tmp_path)
    (tmp_path / "class/infiniband/mlx5_0").mkdir(parents=True)
    assert has_rdma_device(tmp_path)


def test_ports(tmp_path: Path) -> None:
    proc = write(tmp_path, {"sys/net/ipv4/ip_local_port_range": "32768\t60999\n"})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = statuses(port_checks(proc, port))
        assert found == {f"port {port}": "warn", "ports to choose from": "ok"}
    write(tmp_path, {"sys/net/ipv4/ip_local_port_range": "60000 60999"})
    assert statuses(port_checks(proc, port)) == {
        f"port {port}": "ok",
        "ports to choose from": "warn",
    }
    assert statuses(port_checks(tmp_path / "none", port))["ports to choose from"] == "warn"


def test_cores_and_shared_memory(tmp_path: Path) -> None:
    assert statuses(core_checks(2, 8)) == {"cores": "warn"}
    assert statuses(core_checks(4, 8)) == {"cores": "ok"}
    missing = tmp_path / "nowhere"
    assert statuses(shared_memory_checks(missing)) == {str(missing): "warn"}
    assert statuses(shared_memory_checks(Path("/dev/shm")))


@pytest.mark.parametrize(
    ("scope", "capabilities", "status"),
    [("0", "0", "ok"), (None, "0", "ok"), ("1", "0", "warn"), ("1", "80000", "ok")],
)
def test_cross_memory_attach(
    tmp_path: Path, scope: str | None, capabilities: str, status: str
) -> None:
    write(tmp_path, {"self/status": f"Name:\tx\nCapEff:\t{capabilities}\nSeccomp:\t0\n"})
    if scope is not None:
        write(tmp_path, {"sys/kernel/yama/ptrace_scope": scope})
    assert statuses(attach_checks(tmp_path)) == {"cross-memory attach": status}


def test_namespaces(tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    for name, number in (("pid", 4026531836), ("ipc", 4026531839), ("user", 4026531837)):
        (tmp_path / "self/ns" / name).symlink_to(f"{name}:[{number}]")
    assert namespace_checks(tmp_path)[0].value == "the host's"
    (tmp_path / "self/ns/pid").unlink()
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026532000]")
    assert namespace_checks(tmp_path)[0].value == "own pid"


def test_host_memory_is_really_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    assert statuses(virtual_memory_checks()) == {"growable host memory": "ok"}
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before

    def refuse(*_: object) -> int:
        raise DriverError("memfd_create", 1, "not permitted")

    monkeypatch.setattr("kvxfer.memory.host.HostDriver.commit", refuse)
    assert statuses(virtual_memory_checks()) == {"growable host memory": "fail"}


def test_network(tmp_path: Path) -> None:
    assert statuses(network_checks(tmp_path))["network"] == "warn"
    net = {"fast": ("up", "100000"), "slow": ("up", "1000"), "odd": ("up", "-1"), "lo": ("up", "1")}
    for name, (state, speed) in net.items():
        write(tmp_path / "class/net" / name, {"operstate": state, "speed": speed})
    write(tmp_path / "class/net/gone", {"operstate": "down\n"})
    found = network_checks(tmp_path)
    assert statuses(found) == {
        "interface fast": "ok",
        "interface slow": "warn",
        "interface odd": "ok",
        "interface gone": "ok",
        "InfiniBand, RoCE": "ok",
    }
    assert "12.50 GB/s" in found[0].value
    port = tmp_path / "class/infiniband/mlx5_0/ports"
    write(port / "1", {"state": "4: ACTIVE\n", "rate": "400 Gb/sec (4X NDR)\n"})
    write(port / "2", {"state": "1: DOWN\n", "rate": "10 Gb/sec\n"})
    found = statuses(network_checks(tmp_path))
    assert (found["RDMA mlx5_0/1"], found["RDMA mlx5_0/2"]) == ("ok", "warn")


def test_gpus_that_torch_does_not_see(tmp_path: Path) -> None:
    assert statuses(count_checks(0, "580.1", "2.11+cpu")) == {"GPUs": "warn"}
    assert statuses(count_checks(2, "", "2.11")) == {"GPUs": "ok"}
    assert driver_version(tmp_path) == ""
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\nGCC version:\n"
    write(tmp_path, {"driver/nvidia/version": text})
    assert driver_version(tmp_path) == "580.95.05"


def test_topology_and_ceilings() -> None:
    names = ["NVIDIA H200", "NVIDIA H200", "Some Other"]
    reach = [[True, True, False], [True, True, True], [True, True, True]]
    found = topology_checks(names, reach)
    assert [check.status for check in found] == ["ok", "warn", "ok"]
    assert "GB/s" in found[0].hint
    assert found[2].hint == "ceiling unknown"
    assert topology_checks(["one"], [[True]]) == []


class FakeGpu(GpuDriver):
    """A GPU's driver as far as the doctor looks at it."""

    def __init__(self, handle_types: HandleTypes, refuses_protection: bool) -> None:
        self.name, self.device, self.granularity = "cuda", "cuda:0", 2 << 20
        self.kind = AllocationKind(handle_types, gpu_direct=True)
        self.refused = ("FABRIC: not permitted",)
        self.mapped: list[int] = []
        self._refuses = refuses_protection

    def reserve(self, size_bytes: int) -> int:
        self.mapped.append(0)
        return 1 << 30

    def commit(self, address: int, size_bytes: int) -> int:
        self.mapped.append(address)
        return 7

    def export(self, handle: int, writable: bool = True) -> int:
        return os.open("/dev/null", os.O_RDONLY)

    def import_(self, fd: int, address: int, size_bytes: int, writable: bool = True) -> int:
        assert not writable
        if self._refuses:
            self.refused += ("mappings for reading only: 801",)
        self.mapped.append(address)
        return 8

    def decommit(self, address: int, size_bytes: int, handle: int) -> None:
        self.mapped.remove(address)

    def free(self, address: int, size_bytes: int) -> None:
        self.mapped.remove(0)


def test_virtual_memory_of_a_gpu() -> None:
    assert statuses(gpu_memory_checks("cuda:0", "no driver")) == {"cuda:0 virtual memory": "warn"}
    plain = FakeGpu(HandleTypes.NONE, False)
    assert statuses(gpu_memory_checks("cuda:0", plain)) == {"cuda:0 virtual memory": "warn"}
    for refuses, value in ((False, "yes"), (True, "no")):
        gpu = FakeGpu(HandleTypes.POSIX_FD, refuses)
        memory, protection = gpu_memory_checks("cuda:0", gpu)
        assert (memory.status, protection.status, protection.value) == ("ok", "ok", value)
        assert "FABRIC: not permitted" in memory.hint
        assert gpu.mapped == [], "the trial leaves nothing"


def test_settings_of_nixl_name_who_chose_them() -> None:
    found = setting_checks({}, True, 4)
    assert set(statuses(found).values()) == {"ok"}
    assert all("set by kvxfer" in check.value for check in found)
    slow = {"UCX_RMA_PPLN_ENABLE": "n", "KVXFER_NIXL_PROGRESS_THREAD": "1"}
    by_name = {check.name: check for check in setting_checks(slow, True, 4)}
    assert by_name["UCX_RMA_PPLN_ENABLE"].status == "warn"
    assert by_name["KVXFER_NIXL_PROGRESS_THREAD"].value == "1 (set by the user)"
    bad = statuses(setting_checks({"KVXFER_NIXL_PROGRESS_THREAD": "2"}, True, 4))
    assert bad["KVXFER_NIXL_PROGRESS_THREAD"] == "fail"


def test_the_sockets_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_PEER_DIR", str(tmp_path / "s"))
    (found,) = peer_checks()
    assert found.status == "ok" and "mode 700" in found.value
    assert list((tmp_path / "s").iterdir()) == []
    (tmp_path / "s").chmod(0o755)
    assert statuses(peer_checks()) == {"connector peer": "warn"}
    monkeypatch.setenv("KVXFER_PEER_DIR", str(tmp_path / ("long" * 30)))
    assert statuses(peer_checks()) == {"connector peer": "warn"}


def test_a_connectors_program_that_fails_is_a_finding() -> None:
    assert statuses(connector_checks("no_such")) == {"connector no_such": "fail"}
    assert read_answer("c", -11, b"", b"")[0].value == "its program ended with -11"
    assert read_answer("c", 1, b"", b"Traceback\nKeyError: 3\n")[0].hint == "KeyError: 3"
    assert statuses(read_answer("c", 0, b"[{}]", b"")) == {"c": "fail"}


def test_a_connectors_program_has_a_deadline() -> None:
    (found,) = connector_checks("nixl", timeout_s=0.02)
    assert found.status == "warn" and "0.02 s" in found.value


def test_a_section_that_breaks_is_a_finding_and_decides_the_exit_code() -> None:
    def broken() -> list[Check]:
        raise OSError("gone\nwith more lines")

    fine = examine({"a": (lambda: [Check("x", "warn", "1", "do")],)})
    assert exit_code(fine) == 0
    found = examine({"a": (broken, lambda: [Check("y", "ok", "2")])})
    assert [(check.name, check.status) for check in found["a"]] == [("a", "fail"), ("y", "ok")]
    assert "\n" not in found["a"][0].value
    assert exit_code(found) == 1


@pytest.mark.parametrize(
    ("status", "verdict"),
    [("ok", "all is well"), ("warn", "worth a look: it"), ("fail", "cannot run as it should: it")],
)
def test_the_table_shows_markup_as_it_is(status, verdict) -> None:
    output = io.StringIO()
    checks = [Check("it", status, "[red]value[/red]", "hint")]
    show({"part": checks}, Console(file=output, width=120))
    text = output.getvalue()
    assert "[red]value[/red]" in text
    assert verdict in text.splitlines()[-1]


def test_the_command(leaves_nothing_behind: None) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert set(found) == {"packages", "machine", "devices", "network", "connectors"}
    checks = [check for section in found.values() for check in section]
    assert done.returncode == int(any(check["status"] == "fail" for check in checks)) == 0
    names = {check["name"] for check in checks}
    assert {"torch", "kernel", "GPUs", "UCX_RMA_PPLN_ENABLE", "connector nixl"} <= names
    by_name = {check["name"]: check for check in checks}
    assert by_name["connector nixl"]["status"] == by_name["connector peer"]["status"] == "ok"


def test_networks_between_hosts() -> None:
    """A name that is none of this host's is found before a worker fails for it."""
    interfaces = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "172.17.0.1": "docker0", "fe80::1": "eth0"}
    (found,) = nixl_networks({}, False, interfaces)
    assert (found.status, found.value) == ("ok", "docker0 172.17.0.1, eth0 10.0.0.1")
    (named,) = nixl_networks({"UCX_NET_DEVICES": "eth0"}, False, interfaces)
    assert (named.status, named.value) == ("ok", "eth0")
    (wrong,) = nixl_networks({"UCX_NET_DEVICES": "eth0,eth9"}, False, interfaces)
    assert (wrong.status, wrong.value) == ("fail", "eth9")
    assert "10.0.0.1" in wrong.hint
    (rdma,) = nixl_networks({"UCX_NET_DEVICES": "mlx5_0:1"}, True, interfaces)
    assert rdma.status == "ok"
