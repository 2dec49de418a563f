"""Loads on a real `kvxfer serve`, with what its workers' traces tell of each request."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from kvxfer.bench.serving.client import Ask, open_client
from kvxfer.bench.serving.metrics import Answer
from kvxfer.bench.serving.options import ServingOptions
from kvxfer.bench.serving.prompts import Prompt
from kvxfer.bench.serving.rounds import Round, send_all, warm_up
from kvxfer.bench.serving.services import Service, start_pd
from kvxfer.bench.thread_times import thread_times
from kvxfer.errors import KvxferError, WorkerDied

WORKER_ARGS = "--no-enable-prefix-caching --kv-cache-memory-bytes 134217728 --device cpu"
"""Each prompt is computed whole, as in the model, and caches do not bind."""
NUM_WARM_UPS = 4
SETTLE_S = 0.3
"""Until workers have written what they know of a load."""


class Event(msgspec.Struct):
    """A line of a worker's trace."""

    at_ns: int
    event: str
    request: str = ""
    start_ns: int = 0
    end_ns: int = 0
    num_bytes: int = 0


@dataclass
class Observed:
    """A load and what came of it. Times are monotonic seconds."""

    name: str
    prompts: Sequence[Prompt]
    began_s: float
    took_s: float
    """To its last token."""
    answers: list[Answer]
    """In the prompts' order; all came whole."""
    front_cpu_s: float
    client_cpu_s: float
    events: dict[str, list[Event]] = field(default_factory=dict)
    """By request, in order of time."""

    def at_s(self, answer: Answer, event: str) -> float:
        """When it happened last to it. Raises KvxferError where the trace does not tell."""
        for one in reversed(self.events.get(answer.request_id, [])):
            if one.event == event:
                return one.at_ns / 1e9
        raise KvxferError(f"{self.name}: the workers' traces do not tell of {event!r}")


class RealService:
    """One that runs, until the context of `real_service` ends."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def load(
        self, name: str, prompts: Sequence[Prompt], most: int, step: Callable[[], None]
    ) -> Observed:
        """Send them, at most so many at once (0: any number). Raises KvxferError where an answer
        does not come whole."""
        found = asyncio.run(self._send(name, prompts, most, step))
        time.sleep(SETTLE_S)
        found.events = self._events()
        return found

    async def _send(
        self, name: str, prompts: Sequence[Prompt], most: int, step: Callable[[], None]
    ) -> Observed:
        async with open_client("") as client:
            model = await client.model(self._service.url, "")
            ask = Ask(self._service.url, "/v1/completions", model.id, True, True, False, 120.0)
            sizes = [Prompt(0.0, one.tokens[:64], 4) for one in prompts[:NUM_WARM_UPS]]
            await warm_up(client, ask, sizes, _no_text)
            found, before_s, own_s = Round(), _cpu_s(self._service.pid), _own_cpu_s()
            await send_all(client, ask, prompts, most, _no_text, lambda _: step(), found)
            own_s, cpu_s = _own_cpu_s() - own_s, _cpu_s(self._service.pid) - before_s
        if found.gone:
            raise WorkerDied(f"{name}: the service is gone: {found.gone}")
        answers = [found.answers[at] for at in range(len(prompts))]
        for one in answers:
            if one.failure:
                raise KvxferError(f"{name}: an answer did not come: {one.failure}: {one.detail}")
        took_s = max(one.token_s[-1] for one in answers) - found.began_s
        return Observed(name, prompts, found.began_s, took_s, answers, cpu_s, own_s)

    def _events(self) -> dict[str, list[Event]]:
        """Lines that two processes wrote into one another are passed over."""
        found: dict[str, list[Event]] = {}
        for path in self._service.traces:
            for line in path.read_bytes().splitlines() if path.exists() else ():
                try:
                    event = msgspec.json.decode(line, type=Event)
                except msgspec.MsgspecError:
                    continue
                name = event.request.removesuffix("-0")  # the first answer's of a request
                found.setdefault(name, []).append(event)
        for events in found.values():
            events.sort(key=lambda one: one.at_ns)
        return found


@contextmanager
def real_service(
    model: Path, prefill: int, decode: int, log_dir: Path | None, say: Callable[[str], None]
) -> Iterator[RealService]:
    """`kvxfer serve` on the CPU, a thread a worker. Raises KvxferError."""
    options = ServingOptions(
        model=str(model), prefill=prefill, decode=decode, worker_args=WORKER_ARGS
    )
    options.check()
    with ExitStack() as stack:
        if log_dir is None:
            directory = Path(stack.enter_context(TemporaryDirectory(prefix="kvxfer-simulate-")))
        else:
            directory = (log_dir / f"{prefill}p{decode}d").resolve()
            directory.mkdir(parents=True, exist_ok=True)
        say(f"starting kvxfer serve with {prefill} prefill and {decode} decode workers")
        yield RealService(stack.enter_context(start_pd(options, directory, say)))


def _no_text(_: Prompt) -> str:
    return ""


def _cpu_s(pid: int) -> float:
    return sum(thread_times(pid).values()) / 1e9


def _own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
