"""A decode worker in the model: a running batch, a step at a time, and blocks one after the other.

A step is one event, however many sequences are in it: who ends with it, and who needs a block for
it, was written down for that step when they joined.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import simpy

from kvxfer.bench.simulate.cache import Cache
from kvxfer.bench.simulate.costs import Costs
from kvxfer.bench.simulate.request import Request, State
from kvxfer.bench.simulate.servers import Server

Planned = defaultdict[int, list[tuple[Request, int]]]
"""By step: requests, with their life when it was planned."""


class DecodeWorker:
    """`told` of a step's tokens and who ended with it, `freed` when there may be blocks, and
    `preempted` of a request that lost its own: the cluster's."""

    def __init__(
        self,
        env: simpy.Environment,
        costs: Costs,
        model: Server,
        control: Server,
        max_num_seqs: int,
    ) -> None:
        self._env = env
        self._costs = costs
        self._max_num_seqs = max_num_seqs
        self.model = model
        self.control = control
        self.cache: Cache
        self.told: Callable[[int, list[Request]], None]
        self.freed: Callable[[], None]
        self.preempted: Callable[[Request], None]
        self.running: dict[Request, None] = {}
        self._filled: deque[Request] = deque()
        self._waiting: dict[Request, None] = {}
        """Preempted, oldest first: nobody else gets blocks before they do."""
        self._num_growing = 0
        """Of those that hold blocks, who will need another one."""
        self._ends: Planned = defaultdict(list)
        self._needs: Planned = defaultdict(list)
        self._step = 0
        self._context = 0
        self._wake = env.event()
        self.num_steps = 0
        self.num_preempted = 0
        self._batch_s = 0.0
        self.full_s = 0.0
        """What its model computed, as seconds of full batches: one that is not full is as busy, and
        has room."""
        self.pace = 0.0
        """Tokens a second of the last step."""

    def start(self) -> None:
        self._env.process(self._run())

    # --- blocks -------------------------------------------------------------------------------

    def reserve(self, request: Request) -> bool:
        """Blocks of what is to be computed and of one block of tokens more."""
        if self._waiting and request is not next(iter(self._waiting)):
            return False
        size = self.cache.shape.block_size
        needed = self._blocks(min(request.most_tokens, request.to_compute + size))
        if not self.cache.take(needed, self._num_growing):
            return False
        self._waiting.pop(request, None)
        request.decode_blocks = needed
        self._num_growing += self._grows(request)
        return True

    def _blocks(self, num_tokens: int) -> int:
        return self.cache.shape.blocks(num_tokens)

    def _grows(self, request: Request) -> bool:
        return request.decode_blocks < self._blocks(request.most_tokens)

    def _release(self, request: Request) -> None:
        self._num_growing -= self._grows(request)
        self.cache.give(request.decode_blocks)
        request.decode_blocks = 0

    # --- the batch ----------------------------------------------------------------------------

    def join(self, request: Request) -> None:
        """All its KV is here."""
        request.state = State.RUNNING
        if request.told >= request.num_output:
            self._end(request)
            self.told(0, [request])
            self.freed()
            return
        self._filled.append(request)
        self.wake()

    def wake(self) -> None:
        if not self._wake.triggered:
            self._wake.succeed()

    def _run(self) -> simpy.events.ProcessGenerator:
        while True:
            self._admit()
            if self.running:
                self._give_blocks()
            if not self.running:
                self._wake = self._env.event()
                yield self._wake
                continue
            took_s = self._costs.step_s(len(self.running), self._context)
            self.pace = len(self.running) / took_s
            began_s, num_running = self._env.now, len(self.running)
            yield self.model.serve(took_s)
            self._batch_s += num_running * (self._env.now - began_s)
            shared_s = took_s - self._costs.decode_step_s
            self.full_s += shared_s + self._costs.decode_step_s * num_running / self._max_num_seqs
            self._stepped()

    def mean_batch(self) -> float:
        """Sequences that ran, over the time so far."""
        return self._batch_s / self._env.now if self._env.now > 0 else 0.0

    def _admit(self) -> None:
        for _ in range(len(self._filled)):
            if len(self.running) >= self._max_num_seqs:
                return
            request = self._filled.popleft()
            self._enter(request)

    def _enter(self, request: Request) -> None:
        request.life += 1
        request.joined, request.told_before = self._step, request.told
        self.running[request] = None
        self._context += request.kv_tokens
        mark = (request, request.life)
        self._ends[self._step + request.num_output - request.told].append(mark)
        room = request.decode_blocks * self.cache.shape.block_size - request.kv_tokens
        if self._grows(request):
            self._needs[self._step + room + 1].append(mark)

    def _leave(self, request: Request) -> None:
        """What it has said is known from the steps that it took part in."""
        request.told = request.told_before + self._step - request.joined
        request.life += 1
        del self.running[request]
        self._context -= request.kv_tokens

    def _give_blocks(self) -> None:
        """To those who write to a new one with the next step."""
        for request, life in self._needs.pop(self._step + 1, ()):
            if request.life == life:
                self._extend(request)

    def _extend(self, request: Request) -> None:
        """Else it sits out while the cache grows, or those who came last lose theirs."""
        while not self.cache.take(1):
            if self.cache.is_growing or len(self.running) + len(self._filled) == 1:
                self._leave(request)
                self._filled.append(request)
                return
            victim = max((*self.running, *self._filled), key=lambda one: one.arrival)
            self._preempt(victim)
            if victim is request:
                return
        request.decode_blocks += 1
        if self._grows(request):
            size = self.cache.shape.block_size
            self._needs[self._step + 1 + size].append((request, request.life))
        else:
            self._num_growing -= 1

    def _preempt(self, request: Request) -> None:
        if request in self.running:
            self._leave(request)
        else:
            self._filled.remove(request)
        self._release(request)
        request.num_preempted += 1
        self.num_preempted += 1
        self._waiting[request] = None
        order = sorted(self._waiting, key=lambda one: one.arrival)
        self._waiting = dict.fromkeys(order)
        self.preempted(request)

    def _stepped(self) -> None:
        self._step += 1
        self.num_steps += 1
        num_tokens = len(self.running)
        self._context += num_tokens
        over = [one for one, life in self._ends.pop(self._step, ()) if one.life == life]
        for request in over:
            self._leave(request)
            self._end(request)
        self.told(num_tokens, over)
        if over:
            self.freed()

    def _end(self, request: Request) -> None:
        """It decodes no more; it is over when its client has its last token."""
        self._release(request)
