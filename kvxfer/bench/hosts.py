"""`kvxfer bench hosts`: a prefill worker, a decode worker and a router on a host each, here network
namespaces on a switch, with keys: what frames of 1,500 and of 9,000 bytes and lost packets cost.

Needs root. Every prompt's KV and tokens are compared with a single process's. The hosts end with
this command, however it ends.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from kvxfer.bench.netns import enter, why_not
from kvxfer.bench.netns_hosts import Hosts
from kvxfer.bench.record import Record, command_line
from kvxfer.bench.report import Figure, describe_machine
from kvxfer.errors import DeadlineExceeded, KvxferError, TransferError, UsageError

if TYPE_CHECKING:
    from kvxfer.launch.local import WorkerProcess

ROLES = ("prefill", "decode")
START_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 60.0
CHUNK_TOKENS = 256
AT_ONCE = 8
NEW_TOKENS = 4
PORT = 5601


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class HostsOptions:
    """What `kvxfer bench hosts` may be told."""

    mtu: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())] = (1500, 9000)
    """Bytes of the longest frame, one service after the other."""
    loss: int = 3
    """Percent of packets that all hosts drop in the last part of each."""
    requests: int = 24
    """Of each part."""
    prompt_tokens: int = 512
    """Of each prompt."""
    json: Path | None = None
    """Keep the figures in this file, from the first ones on."""


def run_hosts(options: HostsOptions) -> int:
    """Measure, print, write; 1 when a bar was missed. Raises KvxferError."""
    for name, value, least in (
        *(("mtu", one, 1280) for one in options.mtu),
        ("requests", options.requests, 2),
        ("prompt_tokens", options.prompt_tokens, 1),
        ("loss", options.loss, 0),
    ):
        if value < least:
            raise UsageError(name, value, f"must be at least {least}")
    if reason := why_not():
        raise KvxferError(f"no network namespaces here: {reason}")
    record = Record(options.json, command_line("hosts", options))
    record.machine = f"{describe_machine('cpu')}, three namespaces on a switch"
    for mtu in options.mtu:
        record.add(*_with_frames(mtu, options))
    return record.exit_code


def _with_frames(mtu: int, options: HostsOptions) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="kvxfer-") as scratch:
        directory = Path(scratch)
        with Hosts(directory, (*ROLES, "router"), mtu) as hosts:
            return _apart(hosts, lambda: list(_figures(hosts, directory, mtu, options)))


def _apart(hosts: Hosts, measure: Callable[[], list[Figure]]) -> list[Figure]:
    """In a thread that is on the router's host, as are those that it starts."""
    found: list[Figure] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            enter(hosts.net("router"))
            found.extend(measure())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)  # so that Ctrl-C is heard
    if failures:
        raise failures[0]
    return found


def _figures(hosts: Hosts, scratch: Path, mtu: int, options: HostsOptions) -> Iterator[Figure]:
    with Pair(hosts, scratch, options.prompt_tokens) as pair:
        alone = [pair.answer(1) for _ in range(options.requests)]
        spans_ms = [one for part in alone for one in part.spans_ms]
        crowd = pair.answer(options.requests)
        yield Figure.of(f"MTU {mtu}: KV of a prompt under way", spans_ms, "ms", "lower")
        yield Figure.of(f"MTU {mtu}: prompts", [options.requests / crowd.seconds], "/s", "higher")
        parts = [*alone, crowd]
        if options.loss:
            with hosts.losing(options.loss):
                lossy = [pair.answer(1) for _ in range(options.requests)]
                lost = hosts.num_lost()
            what = f"MTU {mtu}, {options.loss} % lost"
            spans_ms = [one for part in lossy for one in part.spans_ms]
            yield Figure.of(f"{what}: KV of a prompt under way", spans_ms, "ms", "lower")
            yield Figure.of(f"{what}: packets lost", [lost], "packets", "higher", 1)
            parts += lossy
        wrong = pair.num_wrong(parts)
        yield Figure.of(f"MTU {mtu}: prompts whose KV or tokens differ", [wrong], "", "lower", 0)


@dataclass(frozen=True, slots=True)
class Part:
    """Prompts that were asked at once."""

    seconds: float
    spans_ms: list[float]
    """From a prompt's first transfer to its last one's end."""
    answers: list[tuple[list[int], list[int], list[str]]]
    """Prompt, tokens, digests of its KV."""


class Pair:
    """Both workers with keys, a router in this thread, and the single process; a context."""

    def __init__(self, hosts: Hosts, scratch: Path, prompt_tokens: int) -> None:
        self._hosts = hosts
        self._scratch = scratch
        self._tokens = prompt_tokens
        self._asked = 0
        self._undo = ExitStack()

    def __enter__(self) -> Pair:
        from kvxfer.control.auth import Keys
        from kvxfer.launch.local import LocalLauncher
        from kvxfer.model.tiny import MODEL_DIR
        from kvxfer.serve.router import Router

        with ExitStack() as undo:
            self._launcher = undo.enter_context(LocalLauncher(self._scratch, _ignore))
            secret = _one_key(self._scratch)
            self._model = MODEL_DIR
            keyed = ("--key-file", str(secret), "--peer-keys", str(secret.parent / "allowed"))
            workers = [self._start(role, keyed) for role in ROLES]
            workers.append(self._start("single", ()))
            self._launcher.wait_for(
                lambda: all(one.is_ready for one in workers), START_TIMEOUT_S, "the workers"
            )
            self._router = Router(keys=Keys.load(secret, secret.parent / "allowed"))
            undo.callback(self._router.close)
            self._plain = Router()
            undo.callback(self._plain.close)
            addresses = [one.address for one in workers[:2]]
            self._backends = self._router.connect(addresses, START_TIMEOUT_S)
            self._single = self._plain.connect([workers[2].address], START_TIMEOUT_S)[0]
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def answer(self, at_once: int) -> Part:
        """So many prompts that no other has, AT_ONCE of them at a time. Raises KvxferError."""
        began_s = time.monotonic()
        spans: list[float] = []
        answers = []
        for first in range(0, at_once, AT_ONCE):
            prompts = [self._prompt() for _ in range(first, min(at_once, first + AT_ONCE))]
            for prompt, done in zip(prompts, self._ask(prompts, single=False), strict=True):
                spans.append(done[2] / 1e6)
                answers.append((prompt, done[0], done[1]))
        return Part(time.monotonic() - began_s, spans, answers)

    def num_wrong(self, parts: list[Part]) -> int:
        """Prompts whose tokens or KV are not those of the single process."""
        wrong = 0
        for prompt, tokens, digests in (one for part in parts for one in part.answers):
            (alone,) = self._ask([prompt], single=True)
            wrong += (tokens, digests) != alone[:2] or not digests
        return wrong

    def _ask(
        self, prompts: list[list[int]], *, single: bool
    ) -> list[tuple[list[int], list[str], int]]:
        """Of each prompt, tokens, digests and the nanoseconds of its transfers."""
        router = self._plain if single else self._router
        to = self._single if single else self._backends[1]
        sent = [router.submit(to, prompt, NEW_TOKENS, verify=True) for prompt in prompts]
        deadline_s = time.monotonic() + REQUEST_TIMEOUT_S
        while any(one.finished is None for one in sent):
            self._launcher.check()
            self._router.poll(0.0 if single else 0.005)
            self._plain.poll(0.005 if single else 0.0)
            if time.monotonic() > deadline_s:
                raise DeadlineExceeded(f"an answer: not within {REQUEST_TIMEOUT_S:g} s")
        found = []
        for one in sent:
            assert one.finished is not None
            if one.finished.error:
                raise TransferError(f"{to.name}: {one.finished.error}")
            stats = one.finished.transfer
            found.append((one.output, one.finished.kv_digests, stats.end_ns - stats.start_ns))
        return found

    def _prompt(self) -> list[int]:
        """Bytes of text, another beginning each time."""
        self._asked += 1
        text = (self._model / "excerpt.txt").read_bytes()
        start = 131 * self._asked % (len(text) - self._tokens)
        return [*text[start : start + self._tokens]]

    def _start(self, role: str, keyed: tuple[str, ...]) -> WorkerProcess:
        arguments = [
            *("--model", str(self._model), "--worker-id", role, "--device", "cpu"),
            *("--max-num-batched-tokens", str(CHUNK_TOKENS), "--no-enable-prefix-caching"),
            *("--kv-cache-memory-bytes", str(64 << 20), *keyed),
        ]
        if role == "single":
            return self._launcher.start(role, "kvxfer.worker.single", arguments)
        arguments += ["--listen", f"tcp://{self._hosts.address(role)}:{PORT}"]
        if role == "decode":
            arguments += ["--prefill", f"tcp://{self._hosts.address('prefill')}:{PORT}"]
        return self._launcher.start(role, role, arguments, self._hosts.entering(role))


def _one_key(scratch: Path) -> Path:
    """One for all: made, and allowed."""
    from kvxfer.control.auth import make_key_pair

    secret, public = make_key_pair(scratch / "keys", "all")
    allowed = scratch / "keys" / "allowed"
    allowed.mkdir(mode=0o700)
    public.rename(allowed / public.name)
    return secret


def _ignore(worker: str, text: str) -> None: ...
