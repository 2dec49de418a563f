"""Workers and a router of one test, turned together."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from support.null_runner import VOCAB_SIZE, NullRunner, Reference
from support.wire_peer import WirePeer
from support.workers import Worker

from kvxfer.cache.spec import KVCacheSpec
from kvxfer.control.auth import Keys
from kvxfer.control.router_messages import Finished
from kvxfer.serve.completion import Completion
from kvxfer.serve.router import Router

DEADLINE_S = 12.0


@dataclass
class Sent:
    """A completion and what it should come to."""

    completion: Completion
    max_new_tokens: int
    specs: Sequence[KVCacheSpec]

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.specs, self.completion.tokens, self.max_new_tokens)

    @property
    def finished(self) -> Finished | None:
        return self.completion.finished

    def check_equal(self) -> None:
        assert self.finished is not None
        assert (self.finished.reason, self.finished.error) == ("length", "")
        assert self.finished.kv_digests == self.reference.digests
        assert self.completion.output == self.reference.tokens


class Cluster:
    """Workers and a router, turned together until something is so. Closes all of them."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.wires: list[WirePeer] = []
        self.router: Router | None = None
        self._seeds = itertools.count(1)

    def add(self, role: str, **options: Any) -> Worker:
        worker = Worker(role, **options)
        self.workers.append(worker)
        return worker

    def wire(self, role: str, listen: str | None = None, **options: Any) -> WirePeer:
        """A peer that the test plays; it is turned with the workers."""
        peer = WirePeer(role, listen, **options)
        self.wires.append(peer)
        return peer

    def remove(self, worker: Worker) -> None:
        """End a worker without a word, like a process that was killed."""
        self.workers.remove(worker)
        worker.close()

    def pair(self, lane: str = "push", **changes: Any) -> tuple[Worker, Worker]:
        """A prefill and a decode worker that know each other. `prefill` and `decode` in `changes`
        are options of one of them."""
        changes = dict(changes)
        ours: dict[str, dict[str, Any]] = {
            role: changes.pop(role, {}) for role in ("prefill", "decode")
        }
        prefill = self.add("prefill", lane=lane, **{**changes, **ours["prefill"]})
        decode = self.add("decode", lane=lane, **{**changes, **ours["decode"]})
        decode.peers.dial(prefill.address)
        self.until(lambda: bool(prefill.peers.ready() and decode.peers.ready()))
        return prefill, decode

    def turn(self) -> None:
        for worker in self.workers:
            worker.turn(0.0)
        for wire in self.wires:
            wire.turn()
        if self.router is not None:
            self.router.poll(0.0)

    def until(self, condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the condition did not come true in time")
            self.turn()
            time.sleep(0.0002)

    def turn_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.turn()
            time.sleep(0.0005)

    def idle(self) -> bool:
        return all(worker.is_idle() for worker in self.workers)

    def until_idle(self) -> None:
        self.until(self.idle)
        for worker in self.workers:
            worker.check_conserved()

    def connect_router(self, decode: Worker, keys: Keys | None = None) -> Router:
        """A router that knows `decode`; it is turned with the workers from then on."""
        router = Router(peer_timeout_s=60.0, keys=keys)
        thread = threading.Thread(target=lambda: router.connect([decode.address], DEADLINE_S))
        thread.start()
        while thread.is_alive():
            for worker in self.workers:
                worker.turn(0.001)
        thread.join()
        self.router = router
        return router

    def send(
        self, decode: Worker, num_tokens: int = 10, max_new_tokens: int = 4, **more: Any
    ) -> Sent:
        router = self.router or self.connect_router(decode)
        backend = next(iter(router._backends.values()))
        seed = next(self._seeds)
        tokens = more.pop("tokens", [(7 * seed + 13 * i) % VOCAB_SIZE for i in range(num_tokens)])
        completion = router.submit(backend, tokens, max_new_tokens, verify=True, **more)
        return Sent(completion, max_new_tokens, decode.engine.specs)

    def finish(self, *sent: Sent) -> None:
        self.until(lambda: all(one.finished is not None for one in sent))

    def close(self) -> None:
        for worker in self.workers:
            if isinstance(worker.runner, NullRunner):
                worker.runner.release()
        if self.router is not None:
            self.router.close()
        for wire in self.wires:
            wire.close()
        for worker in self.workers:
            worker.close()
