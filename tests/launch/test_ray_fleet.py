"""Workers on a cluster: who dies is started again, there may be more and fewer of them, and room
goes back. With processes of this host in place of Ray's actors."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fixtures import num_open_files
from support.ray_here import ClusterHere
from support.running import wait_until

from kvxfer.errors import DeadlineExceeded, UsageError, WorkerDied
from kvxfer.launch.ray_fleet import RayFleet
from kvxfer.launch.ray_seam import Order
from kvxfer.launch.ray_workers import RayWorker, Recipe
from kvxfer.launch.supervisor import WorkerState

TESTS = Path(__file__).parent.parent
GOOD = ("polite", "print=hello", "step=loading", "listen=tcp://127.0.0.1:9", "ready", "sleep=60")


class Told:
    """What a router would be told."""

    def __init__(self) -> None:
        self.said: list[tuple[str, ...]] = []
        self.refuses = ""

    def join(self, address: str, role: str) -> None:
        if self.refuses:
            raise UsageError("address", address, self.refuses)
        self.said.append(("join", role))

    def leave(self, address: str) -> None:
        self.said.append(("leave",))

    def drain(self, address: str) -> None:
        self.said.append(("drain",))


class Fleet(RayFleet):
    cluster: ClusterHere
    told: Told
    scripts: dict[str, tuple[str, ...]]
    steps: list[tuple[str, str]]

    def until(self, condition: Callable[[], bool]) -> None:
        def looked() -> bool:
            self.poll()
            return condition()

        wait_until(looked, 20, "the fleet")

    def names(self, state: WorkerState = WorkerState.READY) -> list[str]:
        return [one.plan.name for one in self.workers if one.state is state]

    def find(self, name: str) -> RayWorker:
        return next(one for one in self.workers if one.plan.name == name)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("KVXFER_LANE", "push")
    files = num_open_files()
    scripts: dict[str, tuple[str, ...]] = {}

    def order(role: str, number: int) -> Order:
        name = f"{role}-{number}"
        script = ",".join(scripts.get(name, GOOD))
        return Order(name, "support.child_worker", (script,), True, {"NOTE": "x"},
                     frozenset({"KVXFER_LANE"}))  # fmt: skip

    steps: list[tuple[str, str]] = []
    bundles = {"prefill": {"CPU": 1.0}, "decode": {"CPU": 2.0}}
    with ClusterHere() as cluster:
        recipe = Recipe(order, bundles, tmp_path, placement_timeout_s=30.0, drain_timeout_s=30.0)
        told = Told()
        found = Fleet(cluster, told, recipe, lambda name, text: steps.append((name, text)))
        found.cluster, found.told, found.scripts, found.steps = cluster, told, scripts, steps
        yield found
        pids = [one.pid for one in found.workers if one.pid]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert num_open_files() == files


def test_it_starts_tells_routers_and_collects_logs(fleet: Fleet, tmp_path: Path) -> None:
    assert fleet.scale({"prefill": 2, "decode": 1}) == {"prefill": 2, "decode": 1}
    fleet.until(lambda: fleet.was_ready)
    assert fleet.names() == ["prefill-0", "prefill-1", "decode-0"]
    assert sorted(fleet.told.said) == [("join", "decode"), ("join", "prefill"), ("join", "prefill")]
    assert ("decode-0", "loading") in fleet.steps
    (group,) = fleet.cluster.groups
    assert group.bundles == [{"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 2.0}]
    pid = fleet.find("decode-0").pid
    assert (tmp_path / "decode-0.log").read_text() == f"(pid={pid}, ip=127.0.0.1) hello\n"
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert b"NOTE=x" in environment
    assert b"KVXFER_LANE=push" not in environment


def test_who_dies_is_started_again_where_it_was_and_the_router_is_told(fleet: Fleet) -> None:
    fleet.scale({"prefill": 1, "decode": 1})
    fleet.until(lambda: fleet.was_ready)
    worker, other = fleet.find("prefill-0"), fleet.find("decode-0").pid
    fleet.told.said.clear()
    os.kill(worker.pid, signal.SIGKILL)
    fleet.until(lambda: worker.state is WorkerState.WAITING)
    assert "killed by SIGKILL" in worker.last_end
    assert fleet.told.said == [("leave",)]
    fleet.poll(worker.due_s - 0.01)
    assert worker.state is WorkerState.WAITING
    fleet.poll(worker.due_s)
    fleet.until(lambda: worker.state is WorkerState.READY)
    assert fleet.told.said == [("leave",), ("join", "prefill")]
    assert (worker.num_restarts, fleet.find("decode-0").pid) == (1, other)
    fleet.cluster.groups[0].hosts[-1].lose()
    fleet.until(lambda: worker.state is WorkerState.WAITING)
    assert worker.last_end == "prefill-0: its node died"
    assert worker.num_failures == 2
    fleet.poll(worker.due_s)
    fleet.until(lambda: worker.state is WorkerState.READY)


def test_it_shrinks_and_grows_and_room_is_used_again_and_goes_back(fleet: Fleet) -> None:
    fleet.scale({"prefill": 2, "decode": 1})
    fleet.until(lambda: fleet.was_ready)
    assert fleet.scale({"prefill": 1}) == {"prefill": 1, "decode": 1}
    assert fleet.told.said[-1] == ("drain",)
    leaving = fleet.find("prefill-1")
    assert (leaving.is_leaving, leaving.state) == (True, WorkerState.READY)
    os.kill(leaving.pid, signal.SIGTERM)  # as one that has drained ends
    fleet.until(lambda: leaving not in fleet.workers)
    fleet.scale({"prefill": 3})
    assert [len(one.bundles) for one in fleet.cluster.groups] == [3, 1], "one is used again"
    fleet.until(lambda: len(fleet.names()) == 4)
    assert fleet.names() == ["prefill-0", "decode-0", "prefill-2", "prefill-3"]
    fleet.scale({"prefill": 2})
    os.kill(fleet.find("prefill-3").pid, signal.SIGTERM)
    fleet.until(lambda: len(fleet.workers) == 3)
    assert [one.is_released for one in fleet.cluster.groups] == [False, True]


def test_one_that_does_not_finish_is_ended(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.scale({"prefill": 2, "decode": 1})
    fleet.until(lambda: fleet.was_ready)
    fleet.scale({"prefill": 1})
    leaving = fleet.find("prefill-1")
    fleet.poll(leaving.due_s - 0.1)
    assert leaving in fleet.workers
    fleet.poll(leaving.due_s)
    assert leaving not in fleet.workers


def test_before_all_were_ready_a_worker_that_ends_ends_it_all(fleet: Fleet) -> None:
    fleet.scripts["decode-0"] = ("failed=no memory", "exit=3")
    fleet.scale({"prefill": 1, "decode": 1})
    with pytest.raises(WorkerDied, match=r"decode-0 worker.*no memory") as caught:
        fleet.until(lambda: False)
    assert caught.value.exit_code == 3


def test_before_all_were_ready_a_node_that_dies_does_not(fleet: Fleet) -> None:
    fleet.scripts["decode-0"] = ("sleep=60",)
    fleet.scale({"prefill": 1, "decode": 1})
    fleet.until(lambda: len(fleet.names()) == 1)
    fleet.cluster.groups[0].hosts[0].lose()
    fleet.until(lambda: fleet.names(WorkerState.WAITING) == ["prefill-0"])


def test_a_host_that_cannot_do_its_work_ends_it_all(fleet: Fleet) -> None:
    fleet.scripts["decode-0"] = ("sleep=60",)
    fleet.scale({"prefill": 1, "decode": 1})
    fleet.poll()
    host = fleet.cluster.groups[0].hosts[0]
    host.lose()
    host.is_faulty = True
    with pytest.raises(WorkerDied, match="prefill-0: its node died"):
        fleet.poll()


def test_a_log_that_cannot_be_written_ends_nothing(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "prefill-0.log").mkdir()
    fleet.scale({"prefill": 1, "decode": 1})
    fleet.until(lambda: fleet.was_ready)
    assert "prefill-0: its log cannot be written" in caplog.text


def test_no_room_is_an_error_at_the_start_and_later_a_line_in_the_log(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.cluster.has_room = False
    fleet.scale({"prefill": 1, "decode": 1})
    fleet.poll()
    with pytest.raises(DeadlineExceeded, match=r"no room within 30 s .*: no nodes"):
        fleet.poll(1e9)
    fleet.cluster.has_room = True
    fleet.until(lambda: fleet.was_ready)
    fleet.cluster.has_room = False
    fleet.scale({"decode": 2})
    fleet.poll(1e9)
    assert fleet.names() == ["prefill-0", "decode-0"]
    assert len(fleet.workers) == 2
    assert fleet.cluster.groups[1].is_released
    assert "no room within 30 s" in caplog.text


def test_an_address_that_the_router_may_not_dial(fleet: Fleet) -> None:
    fleet.told.refuses = "no such key"
    fleet.scale({"prefill": 1, "decode": 1})
    with pytest.raises(WorkerDied, match="no such key"):
        fleet.until(lambda: False)


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_wrong_numbers_change_nothing(fleet: Fleet, count: int) -> None:
    with pytest.raises(UsageError, match=r"decode: .*must be between 1 and 1024"):
        fleet.scale({"prefill": 1, "decode": count})
    assert fleet.workers == []
    assert fleet.cluster.groups == []
