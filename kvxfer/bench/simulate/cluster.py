"""The cluster of the model, and the way of a request through it.

| step | server           | costs                                                                |
| ---  | ---              | ---                                                                  |
| 1    | client           | client_request_s                                                     |
| 2    | router           | front_request_s, its prompt, place_*: its pair is chosen             |
| 3    | decode's control | half of decode_control_s                                             |
| 4    | prefill's control| half of prefill_control_s; then it waits for the model, and blocks   |
| 5    | prefill's model  | its chunks; each leaves by the link when it is computed              |
| 6    | router, client   | first_token_s, then as any token: the first one is told before the   |
|      |                  | KV is there                                                          |
| 7    | both controls    | the other halves, once the last piece is there: then it is proved    |
| 8    | decode's model   | the steps of its batch; the router and the client at each            |

Between processes each message takes hop_s more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import simpy

from kvxfer.bench.serving.prompts import Shape
from kvxfer.bench.simulate.cache import Cache, CacheShape
from kvxfer.bench.simulate.control import announce_growth, start_heartbeats, start_status
from kvxfer.bench.simulate.costs import Costs
from kvxfer.bench.simulate.decode import DecodeWorker
from kvxfer.bench.simulate.links import Links
from kvxfer.bench.simulate.prefill import PrefillWorker
from kvxfer.bench.simulate.request import Request, State
from kvxfer.bench.simulate.router import Placement
from kvxfer.bench.simulate.servers import Cores, Server
from kvxfer.bench.simulate.shape import ClusterShape


class Cluster:
    """Of one run: `env`'s clock is the model's."""

    def __init__(self, shape: ClusterShape, costs: Costs, seed: int) -> None:
        self.shape = shape
        self.costs = costs
        self.env = env = simpy.Environment()
        self.cores = Cores(env, shape.cores, costs.crowding) if shape.cores else None
        chance = np.random.default_rng(seed)
        server = partial(Server, env, self.cores)
        self.fronts, self.client = [server() for _ in range(shape.routers)], server()
        self._turn = 0
        self.links = Links(
            shape.prefill, shape.decode, shape.workers_per_link, shape.fabric_bytes_per_s, costs
        )
        self.prefills = [
            PrefillWorker(env, costs, server(), server(), shape.chunk_tokens)
            for _ in range(shape.prefill)
        ]
        self.decodes = [
            DecodeWorker(env, costs, server(), server(), shape.max_num_seqs)
            for _ in range(shape.decode)
        ]
        self.placement = Placement(shape, costs, self.prefills, self.decodes, chance)
        self._blocked: list[set[int]] = [set() for _ in self.decodes]
        """By decode worker: prefill workers that lacked blocks there."""
        self._slots = simpy.Resource(env, shape.max_concurrency) if shape.max_concurrency else None
        self.num_under_way = 0
        self.num_over = 0
        self._open = 0
        self._all_over = env.event()
        self.on_end: Callable[[], None] = lambda: None
        self._wire()
        controls = [[one.control for one in side] for side in (self.prefills, self.decodes)]
        start_heartbeats(env, costs, controls, shape.peer_timeout_s, chance)
        for front in self.fronts:
            start_status(env, costs, front, shape.prefill, shape.decode)

    def _wire(self) -> None:
        shape, env = self.shape, self.env
        make = partial(
            CacheShape,
            block_size=shape.block_size,
            is_elastic=shape.is_elastic,
            low_watermark=shape.low_watermark,
        )
        sizes = make(shape.prefill_blocks), make(shape.decode_blocks)
        for at, prefill in enumerate(self.prefills):
            peers = [one.control for one in self.decodes]
            grown = partial(self._grown, prefill.control, peers, prefill.wake)
            prefill.cache = Cache(env, sizes[0], self.costs, grown)
            prefill.reserve = partial(self._reserve, at)
            prefill.stream, prefill.computed = self._stream, self._computed
            prefill.start()
        for at, decode in enumerate(self.decodes):
            peers = [one.control for one in self.prefills]
            grown = partial(self._grown, decode.control, peers, partial(self._freed, at))
            decode.cache = Cache(env, sizes[1], self.costs, grown)
            decode.told = self._told
            decode.freed = partial(self._freed, at)
            decode.preempted = self._preempted
            decode.start()

    # --- a request ----------------------------------------------------------------------------

    def run(self, shapes: Sequence[Shape]) -> list[Request]:
        """All of them, to the end of the last one."""
        requests = [
            Request(at, one.num_input, one.num_output, one.at_s) for at, one in enumerate(shapes)
        ]
        self._open = len(requests)
        if requests:
            self.env.process(self._send(requests))
            self.env.run(until=self._all_over)
        return requests

    def _send(self, requests: Sequence[Request]) -> simpy.events.ProcessGenerator:
        """When they are due, which is in this order, and when there is a slot."""
        for request in requests:
            if request.due_s > self.env.now:
                yield self.env.timeout(request.due_s - self.env.now)
            if self._slots is not None:
                yield self._slots.request()
            request.sent_s = self.env.now
            self.env.process(self._arrive(request))

    def _arrive(self, request: Request) -> simpy.events.ProcessGenerator:
        costs = self.costs
        if costs.client_request_s:
            yield self.client.serve(costs.client_request_s)
        self.num_under_way += 1
        front = self.fronts[request.arrival % len(self.fronts)]
        reads_s = costs.front_request_s + costs.front_prompt_token_s * request.num_input
        yield front.serve(reads_s)
        request.why = self.placement.why_not(request)
        if request.why:
            self._over(request, State.REFUSED)
            return
        near = self.placement.place(request)
        under_way = self.num_under_way / len(self.fronts)
        yield front.serve(self.placement.work_s(near, under_way))
        yield from self._ask(request)

    def _ask(self, request: Request) -> simpy.events.ProcessGenerator:
        """From decode to prefill's queue."""
        decode, prefill = self.decodes[request.decode], self.prefills[request.prefill]
        if self.costs.hop_s:
            yield self.env.timeout(self.costs.hop_s)
        yield decode.control.serve(self.costs.decode_control_s / 2)
        if self.costs.hop_s:
            yield self.env.timeout(self.costs.hop_s)
        yield prefill.control.serve(self.costs.prefill_control_s / 2)
        prefill.put(request)

    def _reserve(self, prefill: int, request: Request) -> bool:
        if self.decodes[request.decode].reserve(request):
            return True
        self._blocked[request.decode].add(prefill)
        return False

    def _freed(self, decode: int) -> None:
        """There may be blocks: for those that run there first."""
        self.decodes[decode].wake()
        blocked, self._blocked[decode] = self._blocked[decode], set()
        for prefill in sorted(blocked):
            self.prefills[prefill].wake()

    def _grown(self, grower: Server, peers: Sequence[Server], wake: Callable[[], None]) -> None:
        announce_growth(grower, peers, self.costs)
        wake()

    def _stream(self, request: Request, num_tokens: int) -> None:
        """A chunk was computed: its KV is under way from now on."""
        num_bytes = num_tokens * self.costs.kv_token_bytes
        request.moved_s = self.links.move(self.env.now, request.prefill, request.decode, num_bytes)

    def _computed(self, request: Request) -> None:
        request.told += 1
        self.placement.computed(request)
        after_s = 2 * self.costs.hop_s + self.costs.first_token_s
        is_first = request.told == 1
        self._deliver(1, [request] if is_first else [], [], after_s)
        self.env.process(self._prove(request))

    def _prove(self, request: Request) -> simpy.events.ProcessGenerator:
        decode, prefill = self.decodes[request.decode], self.prefills[request.prefill]
        if request.moved_s > self.env.now:
            yield self.env.timeout(request.moved_s - self.env.now)
        if self.costs.hop_s:
            yield self.env.timeout(2 * self.costs.hop_s)
        yield prefill.control.serve(self.costs.prefill_control_s / 2)
        prefill.release(request)
        yield decode.control.serve(self.costs.decode_control_s / 2)
        decode.join(request)

    def _preempted(self, request: Request) -> None:
        """Computed once more, with what it said, by the worker that did before."""
        self.prefills[request.prefill].put(request)

    # --- tokens -------------------------------------------------------------------------------

    def _told(self, num_tokens: int, over: Sequence[Request]) -> None:
        self._deliver(num_tokens, [], over, self.costs.hop_s)

    def _deliver(
        self, num_tokens: int, firsts: Sequence[Request], lasts: Sequence[Request], after_s: float
    ) -> None:
        """Tokens of one worker to their clients; `firsts` and `lasts` have their time then."""
        costs = self.costs
        for request in lasts:
            self.placement.ended(request)

        def seen(at_s: float) -> None:
            for request in firsts:
                request.first_s = at_s
            for request in lasts:
                request.last_s = at_s
            for request in dict.fromkeys((*firsts, *lasts)):
                if request.has_all:
                    request.last_s = max(request.first_s, request.last_s)
                    self._end(request)

        if not num_tokens:
            seen(self.env.now)
            return

        def passed(at_s: float) -> None:
            if not (costs.client_delivery_s or costs.client_token_s):
                seen(at_s)
                return
            work_s = costs.client_delivery_s + costs.client_token_s * num_tokens
            self.client.then(work_s, seen, max(0.0, at_s - self.env.now))

        # Of several routers one takes all of a step, in turn: as much work, in fewer events.
        num_fronts = len(self.fronts)
        self._turn = (self._turn + 1) % num_fronts
        deliveries_s = costs.front_delivery_s * min(num_tokens, num_fronts)
        work_s = deliveries_s + costs.front_token_s * num_tokens
        self.fronts[self._turn].then(work_s, passed, after_s)

    def _end(self, request: Request) -> None:
        """When its client has its last token, which may be known before."""
        if request.last_s <= self.env.now:
            self._over(request, State.ENDED)
            return
        wait = self.env.timeout(request.last_s - self.env.now)
        assert wait.callbacks is not None
        wait.callbacks.append(lambda _: self._over(request, State.ENDED))

    def _over(self, request: Request, state: State) -> None:
        request.state = state
        self.num_under_way -= 1
        self.num_over += 1
        self.on_end()
        if self._slots is not None:
            self._slots.release(self._slots.users[0])
        if self.num_over == self._open:
            self._all_over.succeed()
