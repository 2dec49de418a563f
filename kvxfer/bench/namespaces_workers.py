"""The hand-over as a user sees it: two workers in two namespaces, KV leaving while prefill runs.

*Exposed* is what is left to wait for when prefill has ended: from the moment that prefill's control
thread hears of the last chunk (event `computed`) to the one at which decode has proved that all KV
is there (`filled`); both processes read one monotonic clock. It is compared with what the last
piece takes alone: a prompt whose KV is as large as that piece, handed over when nothing else is
under way, submitted to complete; the median of all such.

The model has random weights. Its KV is that of Llama 3 8B in size, 128 KiB a token, and it is
narrow, so that a core without a GPU computes KV at about half the rate of a 1 Gbit/s link. What is
measured is whether streaming hides the transfer where the link can keep up; where it cannot, no
transport can, and how far prefill's KV was ahead of the link stands beside the figures.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvxfer.bench.namespaces import NamespacesOptions
from kvxfer.bench.netns import Namespaces
from kvxfer.bench.report import Figure
from kvxfer.errors import DeadlineExceeded, TransferError
from kvxfer.launch.local import LocalLauncher, WorkerProcess
from kvxfer.serve.completion import Backend, Completion
from kvxfer.serve.router import Router
from kvxfer.telemetry.trace import read_trace
from kvxfer.transfer.connector import Direction

EXPOSED_BAR = 1.2
"""What is left to wait for when prefill has ended, by the time that the last piece takes alone."""
NARROW_8B: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
"""In float32, which the CPU computes in, 8 KiB of KV a token and layer."""
TOKEN_BYTES = 128 << 10
CHUNK_TOKENS = 256
PIECE_BYTES = 4 << 20
"""What leaves at once while a chunk is computed: two of 16 layers. The workers' default."""
PIECE_TOKENS = PIECE_BYTES // TOKEN_BYTES
PIECES = 3
"""Pieces alone for each whole prompt: they are quick, and a median of few would be noisy."""
START_TIMEOUT_S = 180.0
REQUEST_TIMEOUT_S = 120.0
ROLES = {"prefill": "left", "decode": "right"}


@dataclass(frozen=True, slots=True)
class Samples:
    """Milliseconds, run by run, and shares of the link's nominal rate."""

    exposed: list[float] = field(default_factory=list)
    last_piece: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    produced: list[float] = field(default_factory=list)
    """How much of the link KV would take as fast as prefill makes it."""

    @property
    def ratios(self) -> list[float]:
        """Of what was exposed, to the last piece alone."""
        alone = statistics.median(self.last_piece)
        return [one / alone for one in self.exposed]


def exposed_times(
    namespaces: Namespaces, options: NamespacesOptions, direction: Direction
) -> Iterator[Figure]:
    """Raises KvxferError, also where KV or tokens differ from a single process's."""
    from kvxfer.model.random_weights import write_random_model

    with tempfile.TemporaryDirectory(prefix="kvxfer-") as scratch:
        directory = Path(scratch)  # mode 0700, as the workers' sockets want it
        write_random_model(directory / "model", NARROW_8B)
        with Workers(namespaces, directory, options, direction) as workers:
            samples = _measure(workers, options)
            workers.check_answers()
    name = f"hand-over by {direction} while prefill runs"
    yield Figure.of(f"{name}: exposed", samples.exposed, "ms", "lower")
    yield Figure.of(f"{name}: last piece alone", samples.last_piece, "ms", "lower")
    yield Figure.of(
        f"{name}: exposed by last piece alone", samples.ratios, "×", "lower", EXPOSED_BAR
    )
    yield Figure.of(f"{name}: prefill", samples.compute, "ms", "lower")
    yield Figure.of(f"{name}: KV made, share of the link", samples.produced, "×", "lower")


def _measure(workers: Workers, options: NamespacesOptions) -> Samples:
    samples = Samples()
    link = options.mbit / 8e3 * 1e9
    for run in range(-options.warm_up, options.runs):
        pieces = [_piece_ms(workers) for _ in range(PIECES)]
        whole = workers.answer(options.prompt_tokens)
        begun, computed = (workers.moment(whole, what) for what in ("requested", "computed"))
        filled = workers.moment(whole, "filled")
        if run < 0:
            continue
        kv_bytes = options.prompt_tokens * TOKEN_BYTES
        samples.last_piece.extend(pieces)
        samples.exposed.append((filled - computed) / 1e6)
        samples.compute.append((computed - begun) / 1e6)
        samples.produced.append(kv_bytes / ((computed - begun) / 1e9) / link)
    return samples


def _piece_ms(workers: Workers) -> float:
    finished = workers.answer(PIECE_TOKENS).finished
    assert finished is not None
    stats = finished.transfer
    if stats.num_tickets != 1:
        raise TransferError(f"the last piece alone went in {stats.num_tickets} pieces")
    return (stats.end_ns - stats.start_ns) / 1e6


class Workers:
    """A prefill worker on the left, a decode worker on the right, and a router; a context."""

    def __init__(
        self,
        namespaces: Namespaces,
        directory: Path,
        options: NamespacesOptions,
        direction: Direction,
    ) -> None:
        self._namespaces = namespaces
        self._directory = directory
        self._options = options
        self._direction = direction
        self._undo = ExitStack()
        self._answers: list[Completion] = []
        self._random = random.Random(7)
        self._launcher: LocalLauncher
        self._router: Router
        self._backends: dict[str, Backend] = {}

    def __enter__(self) -> Workers:
        with ExitStack() as undo:
            self._launcher = undo.enter_context(LocalLauncher(self._directory, _ignore))
            self._router = Router()
            undo.callback(self._router.close)
            prefill, decode = (self._start(role) for role in ROLES)
            self._meet({"prefill": prefill, "decode": decode})
            self._wait(self._are_met, "handshake of the pair", START_TIMEOUT_S)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def answer(self, num_tokens: int) -> Completion:
        """Hand over a prompt of tokens that no other has, and wait for its only new token."""
        tokens = [self._random.randrange(NARROW_8B["vocab_size"]) for _ in range(num_tokens)]
        completion = self._ask("decode", tokens)
        self._answers.append(completion)
        return completion

    def moment(self, completion: Completion, event: str) -> int:
        """When a worker's trace says that `event` came about for a request."""
        for role in ROLES:
            for record in read_trace(self._trace(role)):
                if record["event"] == event and record.get("request") == completion.request_id:
                    return int(record["at_ns"])
        raise TransferError(f"no trace has {event} of {completion.request_id}")

    def check_answers(self) -> None:
        """Compare KV and token of all prompts with the same model in one process. Raises
        TransferError."""
        self._meet({"single": self._start("single")})
        for answer in self._answers:
            reference = self._ask("single", answer.tokens)
            assert answer.finished is not None and reference.finished is not None
            digests = answer.finished.kv_digests
            if not digests or digests != reference.finished.kv_digests:
                raise TransferError(f"KV of {answer.request_id} differs from a single process's")
            if answer.output != reference.output:
                raise TransferError(f"{answer.request_id}: tokens differ from a single process's")

    def _ask(self, role: str, tokens: list[int]) -> Completion:
        completion = self._router.submit(self._backends[role], tokens, 1, verify=True)
        self._wait(lambda: completion.finished is not None, "an answer", REQUEST_TIMEOUT_S)
        assert completion.finished is not None
        if completion.finished.error:
            raise TransferError(f"{role}: {completion.finished.error}")
        return completion

    def _start(self, role: str) -> WorkerProcess:
        tokens = self._options.prompt_tokens
        arguments = [
            *("--model", str(self._directory / "model")),
            *("--worker-id", role),
            *("--device", "cpu"),
            *("--max-model-len", str(tokens + 1)),
            *("--max-num-batched-tokens", str(CHUNK_TOKENS)),
            *("--kv-stream-bytes", str(PIECE_BYTES)),
            *("--kv-cache-memory-bytes", str((tokens + CHUNK_TOKENS) * TOKEN_BYTES)),
            *("--connector", "nixl"),
            *("--trace", str(self._trace(role))),
        ]
        if role == "single":
            return self._launcher.start(role, "kvxfer.worker.single", arguments)
        arguments += ["--listen", self._address(role), "--lane", str(self._direction)]
        if role == "decode":
            arguments += ["--prefill", self._address("prefill")]
        return self._launcher.start(role, role, arguments, self._namespaces.entering(ROLES[role]))

    def _meet(self, workers: dict[str, WorkerProcess]) -> None:
        self._wait(
            lambda: all(worker.is_ready for worker in workers.values()),
            f"start of {' and '.join(workers)}",
            START_TIMEOUT_S,
        )
        addresses = [worker.address for worker in workers.values()]
        backends = self._router.connect(addresses, START_TIMEOUT_S)
        self._backends |= dict(zip(workers, backends, strict=True))

    def _are_met(self) -> bool:
        return self._router.status(self._backends["decode"]).values["peers"] == 1

    def _wait(self, done: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not done():
            self._launcher.check()
            self._router.poll(0.01)
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"{what}: not within {timeout_s:g} s")

    def _address(self, role: str) -> str:
        return f"ipc://{self._directory / role}"

    def _trace(self, role: str) -> Path:
        return self._directory / f"{role}.trace.jsonl"


def _ignore(worker: str, text: str) -> None: ...
