"""One of the two workers of `kvxfer bench growth`: what its control thread does when asked.

The bench asks over a Unix socket and is answered, one request at a time, with (is an error,
value). The ends speak to one another over the control plane, in the words by which lanes are tried
(`kvxfer.control.lane_messages`): LaneReady, blocks may be moved; LanePushed, they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from kvxfer.bench.growth_cases import FIRST_BLOCK, KEPT_BLOCK, RING, SPEC
from kvxfer.bench.growth_mover import Mover
from kvxfer.bench.growth_owner import KEPT_SEED, Owner
from kvxfer.bench.growth_steps import Laps
from kvxfer.bench.null_engine import NullStart, SilentModel
from kvxfer.bench.transfer_fill import clear, fill, is_filled
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.control.lane_messages import LanePushed, LaneReady
from kvxfer.control.session import Peer
from kvxfer.errors import KvxferError, WorkerDied
from kvxfer.worker.assembly import WorkerParts

T = TypeVar("T")

FLOW_SEED = 7


class GrowthStart(NullStart):
    """As a worker of one rank starts, but for the model: a cache of the bench's shape."""

    def load(self, dtype: str | None) -> tuple[KVCacheSpec, ...]:
        self.model = self.runner = SilentModel()  # type: ignore[assignment]
        self.weights = 0
        torch.set_num_threads(self.options.threads)  # what a model would do
        return (SPEC,)


class GrowthEnd:
    """A Role: an Owner or a Mover, as the lane has it, and what both need. Control thread only."""

    is_serving = is_busy = True

    def __init__(
        self, parts: WorkerParts, told: Connection, role: str, transfer_blocks: int
    ) -> None:
        """`told`, the bench's, stays the caller's."""
        self.parts = parts
        self.is_source = role == "prefill"
        self.transfer_blocks = transfer_blocks
        num_sets = 1 if self.is_source else RING
        sets = range(FIRST_BLOCK, FIRST_BLOCK + num_sets * transfer_blocks, transfer_blocks)
        self.sets = [list(range(first, first + transfer_blocks)) for first in sets]
        parts.peers.on_lost = lambda peer, reason: self.fail(f"{peer.name} is lost: {reason}")
        self.laps = Laps()
        self.laps.listen(parts.engine.cache, "shrink", "sleep")
        self.laps.listen_to_steps(parts.engine.cache, "extending", "extend")
        calls = ("register", "describe", "connect", "renew", "revoke", "deregister")
        self.laps.listen(parts.engine.connector, *calls)
        self._told = told
        self._awaited: Callable[[], tuple[Any] | None] | None = None
        """The answer to the bench, once there is one, in a tuple of its own."""
        self._failure = ""
        owner, mover = Owner(self), Mover(self)
        self._verbs: dict[str, Callable[..., None]] = {
            **{call.__name__: call for call in (self.meet, self.prepare)},
            **owner.verbs,
            **mover.verbs,
        }
        self.handlers: dict[type, Callable[[str, Any], None]] = {
            LaneReady: mover.on_ready,
            LanePushed: owner.on_pushed,
        }

    def tick(self) -> None:
        """Raises WorkerDied when the bench has gone."""
        self.parts.set_busy(True)  # as where requests are under way
        if self._awaited is not None:
            self._answer()
        try:
            while self._told.poll():
                verb, arguments = self._told.recv()
                self._obey(verb, arguments)
        except (EOFError, OSError):
            raise WorkerDied("the bench is gone") from None

    def status(self) -> dict[str, int | float | str]:
        return self.parts.status()

    def _obey(self, verb: str, arguments: Sequence[Any]) -> None:
        try:
            self._verbs[verb](*arguments)
        except KvxferError as error:
            self.fail(str(error))
        self._answer()

    def _answer(self) -> None:
        """With a failure, also one of between two requests, or with what is awaited."""
        found = self._awaited() if self._awaited is not None and not self._failure else None
        if not self._failure and found is None:
            return
        answer = (True, self._failure) if found is None else (False, found[0])
        self._awaited, self._failure = None, ""
        self._told.send(answer)

    # --- for owner and mover --------------------------------------------------------------------

    def when(self, is_done: Callable[[], bool], value: Callable[[], object]) -> None:
        """Answer the bench with `value` once `is_done`, which is asked at every turn."""
        self._awaited = lambda: (value(),) if is_done() else None

    def fail(self, reason: object) -> None:
        """Answer the bench, now or when it asks next, with an error."""
        self._failure = self._failure or str(reason)

    def in_model(self, act: Callable[[], T], done: Callable[[T], None]) -> None:
        """`act`, and `done` with the result once the device has done it. The model thread's: it has
        nothing else to do, and the control thread goes on."""
        self.parts.model.submit(partial(self.parts.engine.on_device, act), done, self.fail)

    def compare(self, blocks: Sequence[int], seed: int, done: Callable[[bool], None]) -> None:
        """Tell `done` whether every byte of `blocks` is what `fill` writes."""
        views = self.parts.engine.cache.views[0]
        self.in_model(lambda: is_filled(views, blocks, seed), done)

    def compare_set(self, index: int, done: Callable[[bool], None]) -> None:
        """And erase it, for the next transfer."""
        views, blocks = self.parts.engine.cache.views[0], self.sets[index]

        def act() -> bool:
            is_right = is_filled(views, blocks, FLOW_SEED)
            clear(views, blocks)
            return is_right

        self.in_model(act, done)

    @property
    def peer(self) -> Peer:
        """Raises WorkerDied where it is lost."""
        peers = self.parts.peers.ready()
        if not peers:
            raise WorkerDied("the other worker is lost")
        return peers[0]

    def tell(self, message: LaneReady | LanePushed) -> None:
        self.parts.peers.send(self.peer.key, message)

    # --- what the bench asks of either ----------------------------------------------------------

    def meet(self) -> None:
        """Answered with the usable blocks, once the other worker is ready."""
        pools, peers = self.parts.engine.pools, self.parts.peers
        self.when(lambda: bool(peers.ready()), lambda: pools.num_blocks[0])

    def prepare(self) -> None:
        """Contents for the blocks that are there from the beginning."""
        views = self.parts.engine.cache.views[0]
        done: list[None] = []

        def act() -> None:
            fill(views, [KEPT_BLOCK], KEPT_SEED)
            for blocks in self.sets:
                if self.is_source:
                    fill(views, blocks, FLOW_SEED)
                else:
                    clear(views, blocks)

        self.in_model(act, done.append)
        self.when(lambda: bool(done), lambda: None)
