"""A pair of workers in two network namespaces, and the single process that it is compared with."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvxfer.bench.netns import Namespaces, why_not
from kvxfer.demo.plan import DemoOptions, DemoPlan, plan_demo
from kvxfer.demo.run import Cluster, Demo, trace_path
from kvxfer.demo.screen import Screen
from kvxfer.launch.local import LocalLauncher, WorkerProcess
from kvxfer.serve.router import Router

TIMEOUT_S = 60.0
LINK_MBIT = 1000


@dataclass(frozen=True)
class Apart:
    """Prefill on the left of a link, decode on the right; router and single process outside."""

    plan: DemoPlan
    cluster: Cluster
    namespaces: Namespaces
    sockets: Path
    """Where the workers listen: the only thing that they share."""

    def demo(self) -> Demo:
        return Demo(self.plan, self.cluster, Screen(quiet=True))

    def log(self, role: str) -> str:
        return (self.cluster.run_dir / f"{role}.log").read_text(errors="replace")


@contextmanager
def apart(run_dir: Path, lane: str, device: str = "cpu") -> Iterator[Apart]:
    """Started, met, and ended whatever happens. NIXL is named: `peer` needs no more than a
    directory that both see, which they have here, and would be chosen."""
    options = DemoOptions(device=device, lane=lane, max_new_tokens=16, prompt=("To be, or not",))
    plan = plan_demo(options)
    with ExitStack() as undo:
        namespaces = undo.enter_context(Namespaces())
        namespaces.shape(LINK_MBIT)
        sockets = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-")))
        launcher = undo.enter_context(LocalLauncher(run_dir, lambda name, text: None))
        prefill, decode = f"ipc://{sockets}/prefill", f"ipc://{sockets}/decode"

        def start(role: str, side: str, *more: str) -> WorkerProcess:
            arguments = [*plan.worker_arguments(role, trace_path(run_dir, role)), *more]
            wrapper = namespaces.entering(side) if side else ()
            return launcher.start(role, module(role), arguments, wrapper)

        nixl = ("--connector", "nixl")
        workers = [
            start("prefill", "left", *nixl, "--listen", prefill),
            start("decode", "right", *nixl, "--listen", decode, "--prefill", prefill),
            start("single", ""),
        ]
        launcher.wait_for(lambda: all(w.is_ready for w in workers), TIMEOUT_S, "the workers")
        router = Router()
        undo.callback(router.close)
        backends = router.connect([worker.address for worker in workers], TIMEOUT_S)
        cluster = Cluster(launcher, router, backends[0], backends[1], backends[2], run_dir)
        cluster.wait(lambda: router.status(backends[1]).values["peers"] == 1, "the pair", TIMEOUT_S)
        yield Apart(plan, cluster, namespaces, sockets)


def module(role: str) -> str:
    return "kvxfer.worker.single" if role == "single" else role


def skip_unless_permitted() -> None:
    reason = why_not()
    if reason:
        who = "" if os.geteuid() == 0 else " (they need root)"
        pytest.skip(f"no network namespaces here{who}: {reason}")
