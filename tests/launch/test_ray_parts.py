"""What Ray is told, and what is refused before it is: no cluster is needed."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.commands import TINY_MODEL

from kvxfer.config import WorkerOptions
from kvxfer.config_file import RAY_KEYS
from kvxfer.errors import UsageError
from kvxfer.launch.ray_host import listen_at
from kvxfer.launch.ray_logs import CollectedLog
from kvxfer.launch.ray_seam import Look, Node, Order, missing_room
from kvxfer.serve.options import RayOptions
from kvxfer.serve.ray_plan import check_hosts, check_ray, placed

HERE, THERE = "10.0.0.1", "10.0.0.2"
CPU_NODES = [Node(HERE, {"CPU": 4.0}), Node(THERE, {"CPU": 8.0})]
GPU_NODES = [Node(HERE, {"CPU": 4.0, "GPU": 2.0})]


def worker(**options: Any) -> WorkerOptions:
    return WorkerOptions(model=TINY_MODEL, **options)


def both(**options: Any) -> dict[str, WorkerOptions]:
    return {"prefill": worker(), "decode": worker(**options)}


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "kvxfer.launch.ray", raising=False)
    with pytest.raises(UsageError, match=r"needs ray: pip install 'kvxfer\[ray\]'"):
        import kvxfer.launch.ray  # noqa: F401


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("ray://127.0.0.1:10001", "Ray Client does not do"),
        ("127.0.0.1:1", "no Ray cluster: Connection refused"),
        ("127.0.0.1:99999", "no Ray cluster: "),
    ],
)
def test_an_address_where_no_cluster_is(address: str, reason: str) -> None:
    pytest.importorskip("ray")
    from kvxfer.launch.ray import connected

    with pytest.raises(UsageError, match=reason), connected(address):
        pass


def test_options_and_keys_of_the_file_are_the_same() -> None:
    assert {field.name for field in fields(RayOptions)} == RAY_KEYS


@pytest.mark.parametrize(
    ("options", "given", "field"),
    [
        ({"prefill": 0}, {}, "prefill"),
        ({"num_cpus": -1.0}, {}, "num_cpus"),
        ({"num_cpus": float("inf")}, {}, "num_cpus"),
        ({"num_gpus": 1.5}, {}, "num_gpus"),
        ({"num_gpus": -1.0}, {}, "num_gpus"),
        ({"num_gpus": 1.0}, {"tensor_parallel_size": 2}, "num_gpus"),
        ({"num_gpus": 0.0}, {"device": "cuda"}, "num_gpus"),
        ({"placement_timeout_s": 0.0}, {}, "placement_timeout_s"),
        ({}, {"device": "cuda:1"}, "device"),
        ({}, {"listen": "tcp://127.0.0.1:5601"}, "listen"),
        ({}, {"worker_id": "one"}, "worker_id"),
        ({}, {"block_size": 0}, "block_size"),
    ],
)
def test_wrong_options(options: dict[str, Any], given: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_ray(RayOptions(**options), both(**given))
    assert caught.value.field == field


def test_other_hosts_need_keys() -> None:
    check_hosts(GPU_NODES, HERE, has_keys=False)
    check_hosts(CPU_NODES, HERE, has_keys=True)
    with pytest.raises(UsageError, match=f"key_file: None: .*other hosts .{THERE}.*keygen"):
        check_hosts(CPU_NODES, HERE, has_keys=False)


@pytest.mark.parametrize(
    ("options", "given", "nodes", "device", "bundle"),
    [
        ({}, {}, CPU_NODES, "cpu", {"CPU": 1.0}),
        ({}, {}, GPU_NODES, "auto", {"CPU": 1.0, "GPU": 1.0}),
        ({}, {"tensor_parallel_size": 2}, GPU_NODES, "auto", {"CPU": 1.0, "GPU": 2.0}),
        ({}, {"device": "cpu"}, GPU_NODES, "cpu", {"CPU": 1.0}),
        ({}, {"device": "cuda"}, CPU_NODES, "cuda", {"CPU": 1.0, "GPU": 1.0}),
        ({"num_gpus": 0.0}, {}, GPU_NODES, "cpu", {"CPU": 1.0}),
        ({"num_cpus": 0.0, "num_gpus": 4.0}, {}, GPU_NODES, "auto", {"GPU": 4.0}),
        ({}, {"memory_budget_bytes": 1 << 30}, CPU_NODES, "cpu",
         {"CPU": 1.0, "memory": float(1 << 30)}),
    ],
)  # fmt: skip
def test_what_a_worker_is_given_and_what_is_reserved_for_it(
    options: dict[str, Any],
    given: dict[str, Any],
    nodes: list[Node],
    device: str,
    bundle: dict[str, float],
) -> None:
    keyed = worker(**given, key_file=Path("/keys/a.key"))
    own, found = placed(RayOptions(**options), keyed, nodes, HERE)
    assert (own.device, found) == (device, bundle)
    _, found = placed(RayOptions(**options), worker(**given), nodes, HERE)
    assert found == bundle | {f"node:{HERE}": 0.001}, "without keys on this host alone"


def test_a_part_of_a_gpu_is_a_part_of_its_memory() -> None:
    options = RayOptions(num_gpus=0.5)
    assert placed(options, worker(), GPU_NODES, HERE)[0].gpu_memory_utilization == 0.46
    told = worker(gpu_memory_utilization=0.3)
    assert placed(options, told, GPU_NODES, HERE)[0].gpu_memory_utilization == 0.3


def test_what_is_missing_is_said() -> None:
    bundles = [{"CPU": 2.0, "memory": 3.0 * 2**30, "node:10.0.0.1": 0.001}] * 3
    nodes = [Node(HERE, {"CPU": 4.0, "memory": 8.0 * 2**30}), Node(THERE, {"CPU": 1.0})]
    assert missing_room(bundles, "STRICT_SPREAD", nodes, {"CPU": 3.0, "memory": 2.0**30}) == (
        "3 workers (STRICT_SPREAD) want 6 CPU, 9.0 GiB memory, up to 2 CPU and 3.0 GiB memory in "
        "one place; the cluster's 2 nodes have CPU 4 + 1 (3 free), memory 8.0 GiB + 0.0 GiB "
        "(1.0 GiB free), and STRICT_SPREAD wants 3 nodes"
    )


@pytest.mark.parametrize(
    ("ip", "is_on_loopback", "listen"),
    [
        (HERE, True, "tcp://127.0.0.1:0"),
        (HERE, False, "tcp://10.0.0.1:0"),
        ("fd00::1", False, "tcp://[fd00::1]:0"),
    ],
)
def test_where_a_worker_listens(ip: str, is_on_loopback: bool, listen: str) -> None:
    order = Order("a", "prefill", (), is_on_loopback, {}, frozenset())
    assert listen_at(order, ip) == listen


def test_logs_are_whole_lines_with_their_origin(tmp_path: Path) -> None:
    path = tmp_path / "a.log"

    def looks(log: CollectedLog) -> None:
        for text, pid, ending in ((b"one\ntw", 7, ""), (b"o\n", 7, ""), (b"last", 7, "died"),
                                  (b"again\n", 8, "")):  # fmt: skip
            log.write(Look(HERE, pid, "", False, (), text, ending, 0))

    looks(CollectedLog(path, is_json=False))
    assert path.read_text().splitlines() == [
        *(f"(pid=7, ip={HERE}) {text}" for text in ("one", "two", "last")),
        f"(pid=8, ip={HERE}) again",
    ]
    looks(CollectedLog(tmp_path / "json.log", is_json=True))
    assert (tmp_path / "json.log").read_text() == "one\ntwo\nlast\nagain\n"
