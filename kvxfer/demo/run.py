"""`kvxfer demo`: prefill in one process, decode in another, compared with a single process."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvxfer.demo.checks import GrowthInFlight, growth_in_flight, why_no_growth
from kvxfer.demo.plan import DemoOptions, DemoPlan, plan_demo
from kvxfer.demo.prompts import Prompt, long_prompt
from kvxfer.demo.results import DemoResult, Numbers, RequestResult, compare
from kvxfer.demo.screen import Screen
from kvxfer.errors import DeadlineExceeded, KvxferError, WorkerDied
from kvxfer.launch.local import LocalLauncher, WorkerProcess
from kvxfer.serve.completion import Backend, Completion
from kvxfer.serve.router import Router
from kvxfer.serve.text import TextStream
from kvxfer.telemetry.trace import read_trace

START_TIMEOUT_S = 180.0
REQUEST_TIMEOUT_S = 120.0
GROWTH_ATTEMPTS = 4
"""A pair whose timing did not show the overlap is followed by another."""
MOST_GROWERS = 8


@dataclass
class Cluster:
    """The processes of one demo, connected."""

    launcher: LocalLauncher
    router: Router
    prefill: Backend
    decode: Backend
    single: Backend
    run_dir: Path

    def account(self) -> dict[str, Numbers]:
        backends = {"prefill": self.prefill, "decode": self.decode}
        return {name: self.router.status(backend).values for name, backend in backends.items()}

    def overlap(self) -> GrowthInFlight | None:
        traces = {
            name: read_trace(trace_path(self.run_dir, name)) for name in ("prefill", "decode")
        }
        return growth_in_flight(traces["prefill"] + traces["decode"], traces["decode"])

    def wait(self, done: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Keep everything moving until `done()`."""
        deadline_s = time.monotonic() + timeout_s
        while not done():
            self.launcher.check()
            self.router.poll(0.005)
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"{what}: not within {timeout_s:g} s")


def trace_path(run_dir: Path, role: str) -> Path:
    return run_dir / f"{role}.trace.jsonl"


def run_demo(options: DemoOptions) -> int:
    """0 if all is equal and decode grew in flight, 1 if not. Raises KvxferError."""
    plan = plan_demo(options)
    screen = Screen(quiet=options.json)
    with ExitStack() as undo:
        run_dir = _run_dir(options, undo)
        launcher = undo.enter_context(LocalLauncher(run_dir, screen.step))
        cluster = _start(plan, launcher, screen, run_dir, undo)
        try:
            result = Demo(plan, cluster, screen).run()
        except WorkerDied as error:
            _tell_endings(launcher, error)
            raise
    if options.json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        screen.report(result)
    return 0 if result.ok else 1


def _run_dir(options: DemoOptions, undo: ExitStack) -> Path:
    if options.keep_logs is None:
        return Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-demo-")))
    options.keep_logs.mkdir(parents=True, exist_ok=True)
    for role in ("prefill", "decode", "single"):
        trace_path(options.keep_logs, role).unlink(missing_ok=True)
    return options.keep_logs


def _tell_endings(launcher: LocalLauncher, first: WorkerDied) -> None:
    """One worker died: say how the others took it."""
    for ending in launcher.endings():
        if str(ending) != str(first):
            print(f"kvxfer: {ending}", file=sys.stderr)


def _start(
    plan: DemoPlan, launcher: LocalLauncher, screen: Screen, run_dir: Path, undo: ExitStack
) -> Cluster:
    screen.say(f"model {plan.info.model_dir.name} ({plan.info.architecture}), three processes")

    def start(role: str, module: str, *more: str) -> WorkerProcess:
        arguments = plan.worker_arguments(role, trace_path(run_dir, role))
        return launcher.start(role, module, [*arguments, *more])

    prefill = start("prefill", "prefill")
    single = start("single", "kvxfer.worker.single")
    launcher.wait_for(lambda: bool(prefill.address), START_TIMEOUT_S, "prefill's address")
    decode = start("decode", "decode", "--prefill", prefill.address)
    workers = (prefill, decode, single)
    launcher.wait_for(
        lambda: all(worker.is_ready for worker in workers), START_TIMEOUT_S, "start of the workers"
    )
    router = Router()
    undo.callback(router.close)
    backends = router.connect([worker.address for worker in workers], 30.0)
    cluster = Cluster(
        launcher=launcher,
        router=router,
        prefill=backends[0],
        decode=backends[1],
        single=backends[2],
        run_dir=run_dir,
    )
    cluster.wait(
        lambda: router.status(cluster.decode).values["peers"] == 1, "handshake of the pair", 30.0
    )
    return cluster


class Demo:
    """Sends the prompts, makes decode grow, compares with the single process."""

    def __init__(self, plan: DemoPlan, cluster: Cluster, screen: Screen) -> None:
        self._plan = plan
        self._cluster = cluster
        self._screen = screen
        self._prompts: list[Prompt] = []
        self._streams: list[TextStream] = []

    def run(self) -> DemoResult:
        for prompt in self._plan.prompts:
            self._send(prompt)
        self._finish_all()
        before = self._cluster.account()
        facts = self._cluster.decode.facts
        assert facts is not None, "it answered before the prompts were sent"
        why_not = why_no_growth(facts.geometry.specs, self._plan.options.kv_commit)
        growth = None if why_not else self._grow()
        after = self._cluster.account()
        self._screen.say("\n\n[dim]comparing with the single process ...[/dim]")
        return DemoResult(
            lane=self._lane(),
            requests=self._compare(),
            before=before,
            after=after,
            growth=growth,
            why_no_growth=why_not,
        )

    def _send(self, prompt: Prompt) -> None:
        completion = self._cluster.router.submit(
            self._cluster.decode,
            prompt.tokens,
            self._plan.options.max_new_tokens,
            stop_token_ids=self._plan.info.eos_token_ids,
            verify=True,
            request_id=prompt.name,
        )
        self._prompts.append(prompt)
        self._streams.append(TextStream(prompt.text, completion, self._plan.tokenizer))

    def _finish_all(self) -> None:
        def done() -> bool:
            self._screen.stream(self._streams)
            return all(stream.completion.finished for stream in self._streams)

        self._cluster.wait(done, "answers", REQUEST_TIMEOUT_S)
        for stream in self._streams:
            finished = stream.completion.finished
            if finished is not None and finished.error:
                raise KvxferError(f"{finished.request_id}: {finished.error}")
            self._screen.stream([stream])

    def _grow(self) -> GrowthInFlight | None:
        """Send a companion and, while its KV is on its way, prompts that do not fit beside it."""
        for attempt in range(1, GROWTH_ATTEMPTS + 1):
            plan, router = self._plan, self._cluster.router
            free = int(router.status(self._cluster.decode).values["blocks_free"])
            room = free - plan.blocks(plan.companion_tokens)
            companion = f"companion-{attempt}"
            self._send(long_prompt(companion, plan.companion_tokens, attempt, plan.tokenizer))
            is_under_way = partial(self._is_under_way, self._streams[-1].completion)
            self._cluster.wait(is_under_way, "first bytes of the companion", REQUEST_TIMEOUT_S)
            num_growers = min(MOST_GROWERS, max(1, room // plan.blocks(plan.grower_tokens) + 1))
            for index in range(num_growers):
                name = f"grower-{attempt}" + (f".{index}" if index else "")
                turn = attempt * MOST_GROWERS + index
                self._send(long_prompt(name, plan.grower_tokens, turn, plan.tokenizer))
            self._finish_all()
            found = self._cluster.overlap()
            if found is not None:
                return found
        return None

    def _is_under_way(self, sent: Completion) -> bool:
        """Its KV is on its way, or was, between two looks."""
        if sent.output or sent.finished:
            return True
        status = self._cluster.router.status(self._cluster.prefill)
        return int(status.values["handing_over"]) > 0

    def _lane(self) -> str:
        starts = [
            event
            for role in ("prefill", "decode")
            for event in read_trace(trace_path(self._cluster.run_dir, role))
            if event["event"] == "transfer_start"
        ]
        return str(starts[0]["lane"])

    def _compare(self) -> list[RequestResult]:
        references = [
            self._cluster.router.submit(
                self._cluster.single,
                prompt.tokens,
                self._plan.options.max_new_tokens,
                stop_token_ids=self._plan.info.eos_token_ids,
                verify=True,
                request_id=f"reference-{prompt.name}",
            )
            for prompt in self._prompts
        ]
        self._cluster.wait(
            lambda: all(reference.finished for reference in references),
            "the single process",
            REQUEST_TIMEOUT_S,
        )
        return [
            compare(prompt, stream.text, stream.completion, reference)
            for prompt, stream, reference in zip(
                self._prompts, self._streams, references, strict=True
            )
        ]
