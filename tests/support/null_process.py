"""Real worker and router processes without a model: what a child of the fork server runs.

All of a worker is the product's (`run_worker`: channel, control loop, threads, connectors, memory)
but its engine, which has a model of no weights, and its constants of time.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.null_runner import NullRunner
from support.state_hooks import install
from support.workers import make_info

from kvxfer.bench.netns import enter
from kvxfer.cache.budget import CacheBudget
from kvxfer.cache.kv_cache import KVCache
from kvxfer.cache.layout import CacheGeometry, KVCacheLayout
from kvxfer.cache.pools import BlockPools
from kvxfer.cache.sizing import WarmUp, account_as_given
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.config import WorkerOptions
from kvxfer.errors import KvxferError
from kvxfer.memory.host import HostDriver
from kvxfer.serve.router import Completion, Router
from kvxfer.transfer.connector import Connector, Direction, MemoryWindow
from kvxfer.transfer.multi import MultiConnector
from kvxfer.worker.engine import Engine
from kvxfer.worker.process import Setting, end_with_parent, run_worker
from kvxfer.worker.rank_transfer import RankTransfer

SPEC = KVCacheSpec(
    num_layers=2, num_kv_heads=2, head_dim_k=16, head_dim_v=16, dtype="float32", block_size=4
)
GRANULARITY = 4096
CAPACITY = 96
TIMES = {
    "kvxfer.worker.liveness": {"HELLO_RETRY_S": 0.1, "CHOICE_TIMEOUT_S": 5.0},
    "decode.lane_trials": {"TRIAL_TIMEOUT_S": 2.0},
    "decode.schedule": {"ASK_PAUSE_S": 0.3, "ASK_PAUSE_MAX_S": 1.0},
}
"""Instead of seconds: what a test waits for most."""


class PacedRunner(NullRunner):
    """Takes its time, so that states can be met in the middle."""

    pace_s = 0.003

    def prefill_chunk(self, *arguments: Any) -> int | None:
        time.sleep(self.pace_s)
        return super().prefill_chunk(*arguments)

    def decode_step(self, *arguments: Any) -> list[int]:
        time.sleep(self.pace_s)
        return super().decode_step(*arguments)


def null_engine(
    options: WorkerOptions,
    connectors: Mapping[str, type[Connector]],
    incarnation: str,
    progress: Any,
    *,
    initiates: Direction,
) -> Engine:
    """As `start_engine`."""
    driver = HostDriver(GRANULARITY)
    geometry = CacheGeometry.build([SPEC], [KVCacheLayout("LBHNC")], [CAPACITY], GRANULARITY)
    cache = KVCache(driver, geometry)
    cache.extend([1])
    window = MemoryWindow(cache.buffer.base_address, geometry.total_bytes, "cpu", cache.buffer)
    agent = f"{options.worker_id}.{incarnation}"
    connector = MultiConnector.open(connectors, agent, window, initiates, True, options.lane)
    return Engine(
        options=options,
        info=make_info(),
        runner=PacedRunner([SPEC], cache.views),
        driver=driver,
        cache=cache,
        connector=connector,
        transfer=RankTransfer(connector, cache),
        pools=BlockPools(1),
        account=account_as_given(0, WarmUp(0, 0, 0, 0), 0),
        budget=CacheBudget(geometry, geometry.bytes_of([CAPACITY]), options.max_num_batched_tokens),
    )


def run_null_worker(order: dict[str, Any], ready_fd: int) -> int:
    from decode.worker import DecodeWorker
    from prefill.worker import PrefillWorker

    role = order["role"]
    for module, times in TIMES.items():
        for name, value in times.items():
            assert hasattr(sys.modules[module], name), f"{module} has no {name} any more"
            setattr(sys.modules[module], name, value)
    if order.get("hooks"):
        install(role, Path(order["hooks"]))
    options = WorkerOptions(
        **{"model": Path("none"), "ready_fd": ready_fd, "block_size": SPEC.block_size}
        | {"max_num_batched_tokens": 8, "kv_low_watermark": 0.0}
        | order["options"]
    )
    make_role = {"prefill": PrefillWorker, "decode": DecodeWorker}[role]
    setting = Setting(load_start=lambda: null_engine)
    return run_worker(role, options, order["dial"], make_role, setting)


class NullRouter:
    """A router that is told what to do over a socket: {submit, tokens, max_new_tokens} and
    {cancel}, each with an id. It answers once for each: {id, reason, error, output, digests};
    the reason is 'lost' where its worker is, or where its end did not come in `patience_s` (the
    product's router waits for ever: to go once it has a deadline). It then meets the worker again.
    """

    def __init__(
        self, told: socket.socket, addresses: list[str], peer_timeout_s: float, patience_s: float
    ) -> None:
        self._patience_s = patience_s
        self._told = told
        self._addresses = addresses
        self._peer_timeout_s = peer_timeout_s
        self._open: dict[str, Completion] = {}
        self._waiting: list[dict[str, Any]] = []
        self._router: Router | None = None

    def run(self) -> None:
        self._told.setblocking(False)
        while True:
            if self._router is None:
                self._meet()
            try:
                while (data := self._told.recv(1 << 16)) != b"":
                    self._obey(json.loads(data))
                return
            except BlockingIOError:
                pass
            self._turn()

    def _meet(self) -> None:
        router = Router(peer_timeout_s=self._peer_timeout_s)
        try:
            router.connect(self._addresses, 0.3)
            self._router = router
            self._say({"id": "", "reason": "connected"})
            waiting, self._waiting = self._waiting, []
            for order in waiting:
                self._obey(order)
        except KvxferError:
            router.close()

    def _turn(self) -> None:
        if self._router is None:
            return
        try:
            self._router.poll(0.002)
        except KvxferError as error:  # a worker died, or said what makes no sense
            self._lose(str(error))
        for name, completion in list(self._open.items()):
            if time.monotonic() - completion.sent_s > self._patience_s:
                self._lose(f"request {name}: the client's patience is over")
                return
        for name, completion in list(self._open.items()):
            if completion.finished is not None:
                del self._open[name]
                found = completion.finished
                self._tell(name, found.reason, found.error, completion, found.kv_digests)

    def _obey(self, order: dict[str, Any]) -> None:
        if self._router is None:
            self._waiting.append(order)
            return
        try:
            if order["do"] == "submit":
                backend = next(iter(self._router._backends.values()))
                self._open[order["id"]] = self._router.submit(
                    backend, order["tokens"], order["max_new_tokens"], verify=True
                )
            elif order["id"] in self._open:
                self._router.cancel(self._open[order["id"]])
        except KvxferError as error:
            if order["do"] == "submit":
                self._say({"id": order["id"], "reason": "lost", "error": str(error), "output": []})
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        for name, completion in self._open.items():
            self._tell(name, "lost", why, completion, [])
        self._open.clear()
        if self._router is not None:
            self._router.close()
        self._router = None

    def _tell(
        self, name: str, reason: str, error: str, completion: Completion, digests: list[str]
    ) -> None:
        told = {"id": name, "reason": reason, "error": error, "output": completion.output}
        self._say({**told, "digests": digests})

    def _say(self, record: dict[str, Any]) -> None:
        self._told.send(json.dumps(record).encode())


def run_null_router(order: dict[str, Any], fd: int) -> int:
    end_with_parent()
    with socket.socket(fileno=fd) as told:
        NullRouter(told, order["dial"], order["peer_timeout_s"], order["patience_s"]).run()
    return 0


def speak(wire_version: int) -> None:
    """As a build of that wire version: every module of ours that knows of one."""
    known = [one for name, one in sys.modules.items() if name.startswith("kvxfer.")]
    named = [one for one in known if hasattr(one, "WIRE_VERSION")]
    assert len(named) > 3, named
    for one in named:
        one.WIRE_VERSION = wire_version  # type: ignore[attr-defined]


def run_child(order: dict[str, Any], fds: list[int]) -> int:
    """In the forked child. `fds` are the log and what tells of its start (or takes orders)."""
    log, told = fds
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if order["namespaces"]:
        enter(order["namespaces"])
    if wire_version := order.get("wire_version"):
        speak(wire_version)
    if order.get("stale"):
        from support.stale_process import run_stale

        return run_stale(order, told)
    run = run_null_router if order["role"] == "router" else run_null_worker
    return run(order, told)
