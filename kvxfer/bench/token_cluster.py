"""A prefill worker, a decode worker and a single process; a router times their answers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvxfer.errors import DeadlineExceeded, KvxferError
from kvxfer.launch.local import LocalLauncher, WorkerProcess
from kvxfer.model.loader import ModelInfo
from kvxfer.serve.completion import Backend
from kvxfer.serve.router import Router

if TYPE_CHECKING:
    from kvxfer.bench.tokens import TokensOptions

START_TIMEOUT_S = 200.0
MEET_TIMEOUT_S = 60.0
"""For the handshake and the trial of every lane."""
ANSWER_TIMEOUT_S = 120.0
LOOK_S = 0.2
"""Between looks whether the workers live: each costs as much as a message."""
SEQUENCES = 4
"""Of the largest decode step that is recorded; one at a time is served."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a worker said to a prompt, and when the router saw it."""

    tokens: list[int]
    sent_ns: int
    """CLOCK_MONOTONIC, as the traces."""
    seen_ns: list[int]
    """Of each token."""
    kv_digests: list[str]
    """Of the prompt's KV, where asked for."""
    request_id: str

    def seconds_to(self, index: int) -> float:
        """From sending the prompt to seeing token `index`."""
        return (self.seen_ns[index] - self.sent_ns) / 1e9


@dataclass
class TokenCluster:
    """The processes, connected. One request at a time."""

    launcher: LocalLauncher
    router: Router
    prefill: Backend
    decode: Backend
    single: Backend
    run_dir: Path

    def ask(
        self, backend: Backend, prompt: list[int], new_tokens: int, name: str, verify: bool = False
    ) -> Answer:
        """Raises KvxferError with what the worker said, WorkerDied, DeadlineExceeded."""
        sent_ns = time.monotonic_ns()
        completion = self.router.submit(backend, prompt, new_tokens, verify=verify, request_id=name)
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        look_s = time.monotonic() + LOOK_S
        seen_ns: list[int] = []
        while completion.finished is None:
            self.router.poll(0.05)
            now_ns = time.monotonic_ns()
            seen_ns += [now_ns] * (len(completion.output) - len(seen_ns))
            if now_ns / 1e9 > look_s:
                look_s = now_ns / 1e9 + LOOK_S
                self.launcher.check()
            if now_ns / 1e9 > deadline_s:
                raise DeadlineExceeded(f"{name}: no answer within {ANSWER_TIMEOUT_S:g} s")
        if completion.finished.error:
            raise KvxferError(f"{name}: {completion.finished.error}")
        digests = completion.finished.kv_digests
        return Answer(completion.output, sent_ns, seen_ns, digests, name)

    def device_of(self, backend: Backend) -> str:
        assert backend.facts is not None, "it answered before the router was done connecting"
        return backend.facts.device

    def lane(self) -> str:
        """The lane that decode chose, and its rate in the trial."""
        values = self.router.status(self.decode).values
        lanes = [f"{value}" for key, value in values.items() if key.startswith("lane ")]
        rates = [float(value) for key, value in values.items() if key.startswith("lane_gbps ")]
        return ", ".join(
            f"{lane} ({rate:.3g} GB/s when tried)" for lane, rate in zip(lanes, rates, strict=True)
        )

    def wait(self, done: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not done():
            self.launcher.check()
            self.router.poll(0.05)
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"{what}: not within {timeout_s:g} s")


def trace_path(run_dir: Path, role: str) -> Path:
    return run_dir / f"{role}.trace.jsonl"


def start_cluster(
    options: TokensOptions, info: ModelInfo, devices: tuple[str, str], undo: ExitStack
) -> TokenCluster:
    """All of them ready, and the pair's lane chosen; `undo` ends them."""
    run_dir = _run_dir(options, undo)
    launcher = undo.enter_context(LocalLauncher(run_dir, _say))

    def start(role: str, module: str, device: str, *more: str) -> WorkerProcess:
        told = worker_arguments(options, info, role, device, run_dir)
        return launcher.start(role, module, [*told, *more])

    prefill = start("prefill", "prefill", devices[0])
    launcher.wait_for(lambda: bool(prefill.address), START_TIMEOUT_S, "prefill's address")
    decode = start("decode", "decode", devices[1], "--prefill", prefill.address)
    workers = [prefill, decode]
    _wait_ready(launcher, workers)  # before the third: a GPU's memory is measured meanwhile
    workers.append(start("single", "kvxfer.worker.single", devices[0]))
    _wait_ready(launcher, workers)
    router = Router()
    undo.callback(router.close)
    backends = router.connect([worker.address for worker in workers], 30.0)
    cluster = TokenCluster(launcher, router, backends[0], backends[1], backends[2], run_dir)
    cluster.wait(
        lambda: router.status(cluster.decode).values["peers"] == 1,
        "handshake of the pair",
        MEET_TIMEOUT_S,
    )
    return cluster


def _wait_ready(launcher: LocalLauncher, workers: list[WorkerProcess]) -> None:
    def ready() -> bool:
        return all(worker.is_ready for worker in workers)

    launcher.wait_for(ready, START_TIMEOUT_S, "start of the workers")


def worker_arguments(
    options: TokensOptions, info: ModelInfo, role: str, device: str, run_dir: Path
) -> list[str]:
    """The same for all, but that the single process, which moves nothing, has no lane."""
    kv_mib = options.kv_mib or (128 if device == "cpu" else 4096)
    told = [
        *("--model", str(info.model_dir.resolve())),
        *("--worker-id", f"{role}-0"),
        *("--device", device),
        *("--kv-cache-layout", options.kv_cache_layout),
        *("--max-num-seqs", str(SEQUENCES)),
        *("--max-num-batched-tokens", str(options.max_num_batched_tokens)),
        *("--kv-cache-memory-bytes", str(kv_mib << 20)),
        *("--threads", str(options.threads)),
        "--no-enable-prefix-caching",  # prompts come again, and prefill is in the times
        *("--connector", options.connector),
        *("--on-peer-loss", "exit"),
        *("--trace", str(trace_path(run_dir, role))),
    ]
    if role == "single":
        return told
    stream = ("--kv-stream-bytes", str(options.kv_stream_bytes))
    return [*told, *stream, "--lane", options.lane]


def _run_dir(options: TokensOptions, undo: ExitStack) -> Path:
    if options.keep_logs is None:
        return Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-tokens-")))
    options.keep_logs.mkdir(parents=True, exist_ok=True)
    for role in ("prefill", "decode", "single"):
        trace_path(options.keep_logs, role).unlink(missing_ok=True)
    return options.keep_logs


def _say(worker: str, text: str) -> None:
    print(f"  {worker}: {text}", flush=True)
