"""A router and workers that join and leave, all in the test's process."""

from __future__ import annotations

from typing import Any

from support.cluster import Cluster, Sent
from support.null_runner import VOCAB_SIZE
from support.workers import SPEC, Worker

from kvxfer.serve.backend import Backend
from kvxfer.serve.router import Router
from kvxfer.worker.draining import DrainState


class Fleet:
    """Workers know nobody until the router tells. One that has drained leaves as its process would:
    it says Goodbye, and is gone. The cluster closes all."""

    def __init__(self, cluster: Cluster, **options: Any) -> None:
        self.cluster = cluster
        self.router = Router(60.0, survives_loss=True, request_timeout_s=20.0, **options)
        cluster.router = self.router
        self.workers: dict[str, Worker] = {}
        self._num_sent = 0

    def start(self, name: str, **options: Any) -> Worker:
        """`name` is 'prefill-0' or the like."""
        role, lane = name.partition("-")[0], {"lane": "push"}
        worker = self.cluster.add(role, **lane | {"worker_id": name} | options)
        self.workers[name] = worker
        return worker

    def join(self, *names: str, **options: Any) -> list[Backend]:
        return [self.router.add(self.start(name, **options).address) for name in names]

    def turn(self) -> None:
        self.cluster.turn()
        for name, worker in list(self.workers.items()):
            draining = worker.parts.draining
            draining.tick(worker.role.is_serving, worker.role.is_busy)
            if draining.state is not DrainState.OVER:
                continue
            if not worker.peers.has_left:
                assert draining.is_clean
                worker.peers.farewell(draining.reason, is_quiet=True)
            elif worker.peers.is_alone:
                worker.check_conserved()
                del self.workers[name]
                self.cluster.remove(worker)

    def until(self, condition: Any) -> None:
        def turned() -> bool:
            self.turn()
            return bool(condition())

        self.cluster.until(turned)

    def until_met(self) -> None:
        """Every decode worker has every prefill worker, and the router knows it."""
        roles = [name.partition("-")[0] for name in self.workers]
        wanted = roles.count("prefill")
        self.until(
            lambda: (
                len(self.router.backends) == len(roles)
                and all(
                    one.status.get("peers") == wanted
                    for one in self.router.backends
                    if one.role != "prefill"
                )
            )
        )

    def send(self, num_tokens: int = 9, max_new_tokens: int = 3, **more: Any) -> Sent:
        self._num_sent += 1
        seed = self._num_sent
        tokens = more.pop("tokens", [(7 * seed + 13 * i) % VOCAB_SIZE for i in range(num_tokens)])
        completion = self.router.submit(None, tokens, max_new_tokens, verify=True, **more)
        return Sent(completion, max_new_tokens, [SPEC])

    def finish(self, *sent: Sent) -> None:
        self.until(lambda: all(one.finished is not None for one in sent))
