"""`kvxfer bench serving`: from options to figures, round by round."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median

from rich.console import Console

from kvxfer.bench.record import command_line
from kvxfer.bench.report import describe_machine, write_figures
from kvxfer.bench.serving.client import KNOWN_OWNERS, Ask, Client, Gone, Model, open_client
from kvxfer.bench.serving.kv_share import KvCounts, hand_overs
from kvxfer.bench.serving.metrics import Answer, Summary, Wanted, summarise
from kvxfer.bench.serving.options import ServingOptions
from kvxfer.bench.serving.prompts import Prompt, TraceLine, read_trace
from kvxfer.bench.serving.results import Results, Side, show
from kvxfer.bench.serving.rounds import Round, send_all, warm_up
from kvxfer.bench.serving.screen import Screen
from kvxfer.bench.serving.services import (
    GIVEN,
    PD,
    SINGLE,
    Service,
    given,
    start_pd,
    start_single,
)
from kvxfer.bench.serving.source import Source
from kvxfer.bench.serving.verify import not_verified, verify
from kvxfer.errors import UsageError, WorkerDied


def run_serving(options: ServingOptions) -> int:
    """Measure, print, write; 1 where a request failed, an answer was wrong or a round was cut
    short: what was found until then is kept. Raises KvxferError."""
    options.check()
    options = replace(options, api_key=options.api_key or os.environ.get("OPENAI_API_KEY", ""))
    trace = read_trace(options.trace) if options.trace is not None else []
    _allow_files()
    with ExitStack() as stack:
        run = _Run(options, trace, _directory(options, stack))
        try:
            run.measure()
        finally:
            run.tell()
    return 0 if all(figure.ok for figure in run.results.figures()) else 1


def _allow_files() -> None:
    """As many connections as this process may ever have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _directory(options: ServingOptions, stack: ExitStack) -> Path:
    if options.log_dir is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-serving-")))
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError("log_dir", str(options.log_dir), error.strerror or str(error)) from None
    return options.log_dir.resolve()


class _Run:
    """Of one command; `results` hold what was found so far."""

    def __init__(
        self, options: ServingOptions, trace: Sequence[TraceLine], directory: Path
    ) -> None:
        self._options = options
        self._trace = trace
        self._directory = directory
        self._screen = Screen()
        names = [GIVEN] if options.base_url else [PD]
        self.results = Results(
            options.runs, [Side(name) for name in [*names, *[SINGLE] * options.compare_single]]
        )
        self._wanted = Wanted(
            options.measured(),
            options.percentiles(),
            options.limits_ms(),
            tells_late=not options.max_concurrency
            and bool(trace or math.isfinite(options.request_rate)),
        )
        self._source = Source.of(options, trace)

    def measure(self) -> None:
        """All rounds, then the proof if it was asked for."""
        rounds = [self._source.round(index) for index in range(self._options.runs + 1)]
        with ExitStack() as stack:
            kept: Service | None = None
            for index in range(self._options.runs):
                if self._options.compare_single:
                    self._compare(rounds[index], rounds[-1], index)
                    continue
                if kept is None:
                    kept = stack.enter_context(self._service(self.results.sides[0].name))
                self._round(kept, self.results.sides[0], rounds[index], rounds[-1], index)
        if self._options.verify:
            self.results.more = [not_verified(len(rounds[0]))]
            self._write()
            self.results.more = verify(self._options, rounds[0], self._directory, self._screen)

    def _compare(self, prompts: list[Prompt], extra: list[Prompt], index: int) -> None:
        """Each service alone on the machine; who is first changes from round to round."""
        sides = self.results.sides
        for side in sides if index % 2 == 0 else reversed(sides):
            with self._service(side.name) as service:
                self._round(service, side, prompts, extra, index)

    @contextmanager
    def _service(self, name: str) -> Iterator[Service]:
        options, say = self._options, self._screen.say
        threads = options.threads * (options.prefill + options.decode)
        if name == GIVEN:
            context = given(options)
        elif name == PD:
            say("starting kvxfer serve")
            context = start_pd(options, self._directory, say)
        else:
            say(f"starting a single process of {threads} threads")
            context = start_single(options, self._directory, say, threads)
        with context as service:
            yield service

    def _round(
        self,
        service: Service,
        side: Side,
        prompts: list[Prompt],
        extra: list[Prompt],
        index: int,
    ) -> None:
        """One, with its warm-up, whose prompts are `extra`. Raises WorkerDied when the service is
        gone, after what was found is kept."""
        found, counted = Round(), list[KvCounts]()
        name = f"{side.name}, round {index + 1} of {self._options.runs}"
        try:
            asyncio.run(self._send(service, name, prompts, extra, found, counted))
        except Gone as error:
            found.gone = str(error)
            if not index and not found.answers and side.name == GIVEN:
                raise  # it never was there
        finally:
            self._keep(side, service, found, counted)
        if found.gone:
            raise WorkerDied(f"{name}: the service is gone: {found.gone}")

    async def _send(
        self,
        service: Service,
        name: str,
        prompts: list[Prompt],
        extra: list[Prompt],
        found: Round,
        counted: list[KvCounts],
    ) -> None:
        """Fills in `found`, and what the service had `counted` before and after, if it tells."""
        most, text_of = self._options.max_concurrency, self._source.text_of
        async with open_client(self._options.api_key) as client:
            ask = await self._ask(client, service)
            warm = [replace(one, at_s=0.0) for one in extra[: self._options.num_warmups]]
            await warm_up(client, ask, warm, text_of)
            counted.extend(await _counts(client, service))
            with self._screen.bar(name, len(prompts)) as step:
                await send_all(client, ask, prompts, most, text_of, lambda _: step(), found)
            counted.extend(await _counts(client, service))

    def _keep(
        self, side: Side, service: Service, found: Round, counted: Sequence[KvCounts]
    ) -> None:
        answers = list(found.answers.values())
        if not answers:
            return
        summary = summarise(answers, found.began_s, self._wanted)
        if len(counted) == 2:
            summary |= counted[1].since(counted[0]).summary()
        summary |= _hand_over(service, answers)
        was_sent = not any(one.failure in ("stopped", "not sent") for one in answers)
        side.add(answers, summary, is_whole=was_sent and not found.gone)
        self._write()

    async def _ask(self, client: Client, service: Service) -> Ask:
        options = self._options
        named = options.model if options.base_url else ""
        model: Model = await client.model(service.url, named)
        is_known = model.owned_by in KNOWN_OWNERS
        return Ask(
            url=service.url,
            endpoint=options.endpoint,
            model=model.id,
            ignores_eos=is_known if options.ignore_eos is None else options.ignore_eos,
            returns_token_ids=is_known,
            honors_retry_after=options.honor_retry_after,
            request_timeout_s=options.request_timeout_s,
        )

    # --- what is told -------------------------------------------------------------------------

    def _write(self) -> None:
        if self._options.json is not None:
            figures = self.results.figures()
            write_figures(self._options.json, figures, _command(self._options), self._machine())

    def _machine(self) -> str:
        if self._options.base_url:
            return f"the client's: {describe_machine('cpu')}"
        from kvxfer.serve.plan import count_gpus

        on_host = "--device cpu" in self._options.worker_args.replace("=", " ")
        return describe_machine("cuda:0" if count_gpus() and not on_host else "cpu")

    def tell(self) -> None:
        """Whatever was found, also of a run that was cut short."""
        if not any(side.num_sent for side in self.results.sides):
            return
        self._write()
        console = Console(highlight=False)
        console.print(f"{self._what()}\n{self._machine()}", markup=False, soft_wrap=True)
        show(console, self.results)
        for figure in self.results.more:
            console.print(f"{figure.metric}: {figure.value:g} {figure.unit}")

    def _what(self) -> str:
        options = self._options
        if not options.compare_single:
            return _command(options)
        workers = options.prefill + options.decode
        return (
            f"P/D ({workers} processes of {options.threads} threads) against a single process of "
            f"{options.threads * workers} threads, no prefix caches"
        )


def _command(options: ServingOptions) -> str:
    """To be typed again; without the key."""
    return command_line("serving", replace(options, api_key=""))


async def _counts(client: Client, service: Service) -> list[KvCounts]:
    """What the service says that it has counted, if it does."""
    try:
        status, data = await client.look(f"{service.url}/metrics")
    except Gone:
        return []
    counts = KvCounts.read(data.decode(errors="replace")) if status == 200 else None
    return [] if counts is None else [counts]


def _hand_over(service: Service, answers: Sequence[Answer]) -> Summary:
    """By the traces of its workers, where there are any."""
    found = hand_overs(service.traces, answers)
    if not found:
        return {}
    return {
        ("KV hand-over", "after prefill, median"): median(one.ms for one in found),
        ("KV hand-over", "share of TTFT, median"): median(one.share for one in found),
    }
