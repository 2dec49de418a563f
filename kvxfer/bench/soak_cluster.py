"""The two workers of `kvxfer bench soak`, and what they and the router hold."""

from __future__ import annotations

import mmap
import os
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvxfer.control.cache_messages import CacheState, Shrink, Sleep, WakeUp
from kvxfer.errors import CacheError
from kvxfer.launch.local import LocalLauncher, WorkerProcess
from kvxfer.serve.completion import Backend, Completion
from kvxfer.serve.router import Router

START_TIMEOUT_S = 120.0
CHANGE_TIMEOUT_S = 20.0
KV_BYTES = 24 << 20
POLL_S = 0.005
SETTLE_S = 1.0
"""For what a sleep leaves to the threads: the end of the agents that were in use before it."""


@dataclass(frozen=True)
class Held:
    """What each process holds, without KV."""

    by_process: dict[str, dict[str, int]]
    """By 'prefill', 'decode' and 'router': rss_bytes, files, sockets, threads."""

    def has_more(self, other: Held) -> bool:
        """Files or threads, in any process: an agent that ends closes its files before the last of
        its threads is gone."""
        mine, theirs = self.by_process, other.by_process
        kinds = ("files", "threads")
        return any(mine[name][kind] > theirs[name][kind] for name in mine for kind in kinds)


class SoakCluster:
    """One thread. `start` makes one; its caller's stack ends it."""

    def __init__(
        self, launcher: LocalLauncher, workers: list[WorkerProcess], router: Router
    ) -> None:
        self._launcher = launcher
        self._workers = workers
        self._router = router
        self._backends: list[Backend] = []
        self._looks = 0

    @classmethod
    def start(cls, directory: Path, connector: str, lane: str, undo: ExitStack) -> SoakCluster:
        launcher = undo.enter_context(LocalLauncher(directory, lambda name, text: None))
        told = [
            *("--model", "pattern"),
            *("--device", "cpu"),
            *("--connector", connector),
            *("--lane", lane),
            *("--kv-cache-memory-bytes", str(KV_BYTES)),
            *("--kv-commit", "elastic"),
            *("--kv-initial-blocks", "8"),
            *("--max-num-batched-tokens", "32"),
        ]
        prefill = launcher.start("prefill", "prefill.null", [*told, "--worker-id", "prefill-0"])
        launcher.wait_for(lambda: bool(prefill.address), START_TIMEOUT_S, "prefill's address")
        more = ["--worker-id", "decode-0", "--prefill", prefill.address]
        decode = launcher.start("decode", "decode.null", [*told, *more])
        workers = [prefill, decode]
        ready = lambda: all(one.is_ready for one in workers)  # noqa: E731
        launcher.wait_for(ready, START_TIMEOUT_S, "start of the workers")
        router = Router(peer_timeout_s=30.0)
        undo.callback(router.close)
        cluster = cls(launcher, workers, router)
        cluster._backends = router.connect([one.address for one in workers], CHANGE_TIMEOUT_S)
        launcher.wait_for(cluster._have_met, START_TIMEOUT_S, "handshake of the pair")
        return cluster

    def _have_met(self) -> bool:
        return all(self._router.status(one).values["peers"] == 1 for one in self._backends)

    def submit(self, prompt: list[int], num_new: int) -> Completion:
        return self._router.submit(self._backends[1], prompt, num_new)

    def poll(self) -> None:
        """Raises WorkerDied, also when nothing is heard of one."""
        self._router.poll(POLL_S)
        self._looks += 1
        if self._looks % 200 == 0:
            self._launcher.check()

    def shrink(self, chance: random.Random) -> bool:
        """One worker's cache to a random size, as far as it can give back now; whether it did."""
        backend = chance.choice(self._backends)
        before = self._router.status(backend).values["committed_bytes"]
        state = self._manage(backend, Shrink([chance.randint(8, 64)], 0.2))
        return state.committed_bytes < int(before)

    def sleep_and_look(self, first: Held | None) -> Held:
        """Both asleep, looked at until no more is held than at the `first` look or SETTLE_S have
        passed, awake again."""
        for backend in self._backends:
            state = self._manage(backend, Sleep(CHANGE_TIMEOUT_S))
            if state.problem:
                raise CacheError(f"sleep: {state.problem}")
        pids = {worker.name: worker.process.pid for worker in self._workers}
        pids["router"] = os.getpid()
        until_s = time.monotonic() + SETTLE_S
        while True:
            held = Held({name: _held(Path(f"/proc/{pid}")) for name, pid in pids.items()})
            settled = first is not None and not held.has_more(first)
            if settled or time.monotonic() > until_s:
                break
            time.sleep(POLL_S)
        for backend in self._backends:
            state = self._manage(backend, WakeUp())
            if state.problem:
                raise CacheError(f"wake-up: {state.problem}")
        return held

    def _manage(self, backend: Backend, request: Shrink | Sleep | WakeUp) -> CacheState:
        return self._router.manage(backend, request, 2 * CHANGE_TIMEOUT_S)

    def generations(self) -> dict[str, int]:
        """By worker: how often regions were added, by its own word."""
        return {
            worker.name: int(self._router.status(backend).values["generation"])
            for worker, backend in zip(self._workers, self._backends, strict=True)
        }

    def why_not_conserved(self) -> list[str]:
        """By worker, at idle: blocks held for no request, committed bytes that are not registered,
        a line of the log that says so."""
        found = []
        for worker, backend in zip(self._workers, self._backends, strict=True):
            values = self._router.status(backend).values
            held = int(values["blocks_used"]) + int(values["blocks_quarantined"])
            if held:
                found.append(f"{worker.name}: {held} blocks are held for no request")
            null = 1
            free = int(values["blocks_free"]) + int(values["prefix_cache_blocks"]) + null
            if free + held != values["blocks_total"]:
                total = values["blocks_total"]
                found.append(f"{worker.name}: {free} blocks free and {held} held of {total}")
            if values["committed_bytes"] != values["registered_bytes"]:
                committed, registered = values["committed_bytes"], values["registered_bytes"]
                found.append(f"{worker.name}: {committed} bytes committed, {registered} registered")
            if values.get("requests", 0) or values.get("jobs", 0):
                found.append(f"{worker.name}: requests are left")
            if "conservation is broken" in worker.log.read_text(errors="replace"):
                found.append(f"{worker.name}: conservation was broken at idle")
        return found


def _held(process: Path) -> dict[str, int]:
    """Of a directory in /proc."""
    held = dict.fromkeys(("rss_bytes", "files", "sockets", "threads"), 0)
    held["rss_bytes"] = int((process / "statm").read_text().split()[1]) * mmap.PAGESIZE
    held["threads"] = sum(1 for _ in (process / "task").iterdir())
    for link in (process / "fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue  # closed meanwhile, as the one that lists them is
        held["files"] += 1
        held["sockets"] += target.startswith("socket:")
    return held
