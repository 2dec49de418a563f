"""The thread of a worker process that owns its endpoint and its control channel.

The model's thread gives it Steps and takes Outcomes; nothing else is shared. Its loop ends with
`stop`, or with an error that is a bug of ours: every load fails then, and `take` raises it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from connectors.vllm.consumer import Consumer
from connectors.vllm.handover import Load, RankAddress, Step
from connectors.vllm.layout import HALVES, VllmCache
from connectors.vllm.links import Links
from connectors.vllm.messages import CODEC, Facts, Message
from connectors.vllm.options import Options
from connectors.vllm.parts import Request
from connectors.vllm.producer import Producer
from connectors.vllm.ranks import Share
from connectors.vllm.stats import Stats
from kvxfer.control.channel import Channel
from kvxfer.errors import ControlError, DeadlineExceeded, KvxferError, WorkerDied
from kvxfer.transfer.endpoint import Endpoint, HeadShard
from kvxfer.worker.mailbox import Mailbox

logger = logging.getLogger(__name__)

BUSY_WAIT_S = 0.001
"""Between polls while transfers of ours are under way,"""
SERVING_WAIT_S = 0.002
"""while somebody may be reading from us, by a transport that needs our progress,"""
IDLE_WAIT_S = 0.02
"""and else: what is told, or comes in, wakes the thread at once."""
TICK_S = 0.1
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a rank is started with."""

    options: Options
    facts: Facts
    port_offset: int
    """Of the port that this rank listens on."""
    shard: HeadShard
    is_producer: bool
    is_consumer: bool
    shares: Callable[[int], list[Share]]


@dataclass(slots=True)
class Outcome:
    """Since it was last taken."""

    sent: set[str] = field(default_factory=set)
    """Producer: requests whose blocks are vLLM's again."""
    loaded: set[str] = field(default_factory=set)
    """Consumer: requests whose load has ended,"""
    failed: dict[str, str] = field(default_factory=dict)
    """and those among them whose KV must not be used, with the reason."""
    invalid_blocks: set[int] = field(default_factory=set)
    """The scheduler's blocks of the failed ones, from the first on that was to be loaded."""

    def fail(self, load: Load, reason: str, first_block: int) -> None:
        """`first_block`: which entry of its tables was the first to be loaded."""
        logger.warning("request %s: its KV was not loaded: %s", load.request_id, reason)
        self.loaded.add(load.request_id)
        self.failed[load.request_id] = reason
        for group in load.blocks:
            self.invalid_blocks.update(block for block in group[first_block:] if block)


class Service:
    """`cache`'s tensors stay vLLM's, and stay where they are until `stop` has returned."""

    def __init__(self, setup: Setup, cache: VllmCache) -> None:
        self._setup = setup
        self._cache = cache
        self.stats = Stats()
        self.address: RankAddress | None = None
        """Where consumers dial us, once started; None on a rank that only consumes."""
        self._steps: Mailbox[Step] = Mailbox()
        self._lock = threading.Lock()
        self._outcome = Outcome()
        self._error: BaseException | None = None
        self.silent: frozenset[str] = frozenset()
        """After `stop`: consumers that may still read, as they were lost and never let go."""
        self._is_up = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._main, name="kvxfer-connector", daemon=True)

    # ---- from the model's thread

    def start(self) -> None:
        """Returns once the tensors are registered. Raises UsageError, ConnectorError."""
        self._thread.start()
        if not self._is_up.wait(START_TIMEOUT_S):
            raise DeadlineExceeded(f"the KV cache was not registered in {START_TIMEOUT_S:g} s")
        if self._error is not None:
            self._thread.join(STOP_TIMEOUT_S)
            raise self._error

    def tell(self, step: Step) -> None:
        if not step.is_empty:
            self._steps.put(step)

    def take(self) -> Outcome:
        """Raises WorkerDied after an error of the thread."""
        with self._lock:
            outcome, self._outcome = self._outcome, Outcome()
        if self._error is not None:
            raise WorkerDied(f"thread {self._thread.name} died: {self._error}") from self._error
        return outcome

    def stop(self) -> None:
        """Nothing of ours moves any more when this returns, and consumers have let go; those that
        were silent instead are `silent`. Idempotent; raises DeadlineExceeded where transfers do not
        end: the tensors must stay then."""
        self._is_stopping = True
        self._steps.put(Step())
        if self._thread.is_alive():
            self._thread.join(2 * STOP_TIMEOUT_S)
            if self._thread.is_alive():
                raise DeadlineExceeded(f"{self._thread.name} has not ended")
        self._steps.close()
        if isinstance(self._error, DeadlineExceeded):
            raise self._error

    # ---- the thread

    def _main(self) -> None:
        try:
            self._run()
        except Exception as error:  # handed to the model's thread, which raises it
            if not isinstance(error, KvxferError):
                logger.exception("thread %s died", self._thread.name)
            self._error = error
        finally:
            self._is_up.set()

    def _run(self) -> None:
        setup = self._setup
        listen = setup.options.address(setup.port_offset) if setup.is_producer else None
        channel = Channel(setup.facts.incarnation, listen, setup.options.keys(), CODEC)
        try:
            channel.watch(self._steps.fileno())
            names = setup.options.connectors.split(",")
            with Endpoint(setup.facts.name, self._cache.memory, names, [setup.shard]) as endpoint:
                endpoint.register()
                if setup.is_producer:
                    self.address = RankAddress(channel.address, setup.facts.incarnation)
                loop = _Loop(self, channel, endpoint)
                self._is_up.set()
                loop.run()
        finally:
            channel.close()


class _Loop:
    """What lives as long as the endpoint does."""

    def __init__(self, service: Service, channel: Channel, endpoint: Endpoint) -> None:
        self._service = service
        self._channel = channel
        self._endpoint = endpoint
        setup, cache = service._setup, service._cache
        self._producer = Producer(setup.options, setup.facts, endpoint, self._send, cache.blocks)
        self._consumer = Consumer(
            endpoint,
            cache.groups,
            setup.shares,
            cache.blocks,
            service.stats,
            setup.options.claim_timeout_s,
            cache.block_size,
            cache.page_format.startswith(HALVES),
        )
        self._links = Links(
            setup.options,
            setup.facts,
            channel,
            endpoint,
            self._consumer.on_ready,
            self._consumer.on_gone,
        )
        self._consumer.links = self._links
        self._next_tick_s = self._next_beat_s = 0.0

    def run(self) -> None:
        while not self._service._is_stopping:
            self._turn()
        self._leave("its cache's memory goes")
        self._report()
        self._service.silent = frozenset(self._producer.silent)

    def _leave(self, reason: str) -> None:
        """Returns once nothing of ours is under way, and consumers have let go or are lost."""
        self._consumer.close(reason)
        self._producer.leave(reason)
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while self._consumer.is_busy or self._producer.has_readers:
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"transfers have not ended in {STOP_TIMEOUT_S:g} s")
            self._turn()
        self._links.close(reason)

    def _turn(self) -> None:
        wait_s = SERVING_WAIT_S if self._producer.is_busy else IDLE_WAIT_S
        wait_s = BUSY_WAIT_S if self._consumer.is_busy else wait_s
        for letter in self._channel.poll(wait_s):
            self._hear(letter.peer, letter.message)  # type: ignore[arg-type]
        for step in self._service._steps.drain():
            self._take_in(step)
        self._endpoint.poll()
        self._consumer.poll()
        now_s = time.monotonic()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + TICK_S
            self._tick(now_s)
        self._report()

    def _hear(self, peer: str, message: Message) -> None:
        if peer.startswith("in:"):
            self._producer.hear(peer, message)
        elif (link := self._links.hear(peer, message)) is not None:
            self._consumer.hear(link, message)

    def _take_in(self, step: Step) -> None:
        for offer in step.offers:
            self._producer.offer(offer)
        for claim in step.claims:
            self._consumer.claim(claim)
        for load in step.loads:
            self._consumer.load(load)
        for request_id in step.drops:
            self._consumer.drop(request_id)

    def _tick(self, now_s: float) -> None:
        is_beat = now_s >= self._next_beat_s
        if is_beat:
            self._next_beat_s = now_s + self._service._setup.options.peer_timeout_s / 6
        self._producer.tick(now_s, is_beat)
        self._links.tick(now_s, is_beat)
        self._consumer.tick(now_s)

    def _send(self, peer: str, message: Message) -> bool:
        try:
            self._channel.send(peer, message)  # type: ignore[arg-type]
        except ControlError as error:
            logger.info("not sent: %s", error)  # silence will tell whether it is gone
            return False
        return True

    def _report(self) -> None:
        freed = self._producer.leases.take_freed()
        ended, self._consumer.ended = self._consumer.ended, []
        if freed or ended:
            with self._service._lock:
                outcome = self._service._outcome
                outcome.sent |= freed
                for request in ended:
                    _record(outcome, request, self._service._cache)


def _record(outcome: Outcome, request: Request, cache: VllmCache) -> None:
    load = request.load
    assert load is not None
    if request.error:
        outcome.fail(load, request.error, load.start // (cache.block_size * cache.ratio))
    else:
        outcome.loaded.add(load.request_id)
