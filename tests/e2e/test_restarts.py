"""Real processes that are killed, stopped and started again: the others go on, and answer."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.by_hand import HandStarted, hand_started
from support.commands import TINY_MODEL

from kvxfer.model.tokenizer import Tokenizer
from kvxfer.serve.completion import Backend, Completion
from kvxfer.serve.router import Router

QUICK = ("--peer-timeout-s", "2", "--request-timeout-s", "60")
NEW_TOKENS = 12
START_TIMEOUT_S = 180.0


class Pair:
    """Workers by name, each started again where it was, and a router that outlives them."""

    def __init__(self, directory: Path, undo: ExitStack) -> None:
        self._directory = directory
        self._undo = undo
        self._starts = 0
        self._options: dict[str, tuple[str, ...]] = {}
        self.workers: dict[str, HandStarted] = {}
        self.addresses: dict[str, str] = {}
        self.router = self.new_router()

    def new_router(self) -> Router:
        router = Router(2.0, survives_loss=True, request_timeout_s=60.0)
        self._undo.callback(router.close)
        return router

    def start(self, name: str, *options: str) -> HandStarted:
        """`name` begins with its role."""
        self._starts += 1
        log = self._directory / f"{self._starts}-{name}"
        listen = self.addresses.get(name, "tcp://127.0.0.1:0")
        self._options.setdefault(name, options)
        role = name.split("-")[0]
        fixed = ("--worker-id", name, "--listen", listen, *QUICK)
        worker = self._undo.enter_context(hand_started(role, log, *fixed, *self._options[name]))
        self.workers[name], self.addresses[name] = worker, worker.address
        return worker

    def kill(self, name: str) -> None:
        self.workers[name].process.kill()
        self.workers[name].process.wait(timeout=10)

    def until(self, condition: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.router.poll(0.02)
            assert time.monotonic() < deadline, "it did not come true in time"

    def send(self, backend: Backend, tokens: list[int], count: int = NEW_TOKENS) -> Completion:
        return self.router.submit(backend, tokens, count, verify=True)

    def answer(self, backend: Backend, tokens: list[int]) -> tuple[list[int], list[str], str]:
        completion = self.send(backend, tokens)
        self.until(lambda: completion.finished is not None)
        assert completion.finished is not None
        return completion.output, completion.finished.kv_digests, completion.finished.error

    def peers_of(self, backend: Backend, count: int) -> None:
        """Wait until it knows so many ready workers."""

        def known() -> bool:
            return (
                backend.facts is not None and self.router.status(backend).values["peers"] == count
            )

        self.until(known)

    def check_idle(self, *backends: Backend) -> None:
        def idle(backend: Backend) -> bool:
            values = self.router.status(backend).values
            return values["blocks_used"] == values["blocks_quarantined"] == 0

        self.until(lambda: all(idle(one) for one in backends))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with ExitStack() as undo:
        yield Pair(tmp_path, undo)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return Tokenizer.load(TINY_MODEL).encode("HAMLET.\nTo be, or not to be, that is the " * 6)


def serving(pair: Pair, lane: str) -> list[Backend]:
    prefill = pair.start("prefill-a", "--lane", lane)
    decode = pair.start("decode-a", "--lane", lane, "--prefill", prefill.address)
    for worker in (prefill, decode):
        worker.wait_for("ready", START_TIMEOUT_S)
    backends = pair.router.connect([pair.addresses["decode-a"], prefill.address], 60)
    pair.peers_of(backends[0], 1)
    return backends


@pytest.mark.slow  # tests/worker/test_resync.py has it in one process
@pytest.mark.parametrize("lane", ["push", "pull"])
def test_each_role_is_killed_and_started_again_and_the_others_stay(
    pair: Pair, tokens: list[int], lane: str
) -> None:
    decode, prefill = serving(pair, lane)
    expected = pair.answer(decode, tokens)
    assert expected[2] == ""
    for name in ("prefill-a", "decode-a", "decode-a", "prefill-a", "router"):
        others = {key: one.process.pid for key, one in pair.workers.items() if key != name}
        if name == "router":
            pair.router.close()
            pair.router = pair.new_router()
            addresses = [pair.addresses["decode-a"], pair.addresses["prefill-a"]]
            decode, prefill = pair.router.connect(addresses, 60)
        else:
            old = pair.workers[name]
            pair.kill(name)
            pair.start(name).wait_for("ready", START_TIMEOUT_S)
            assert old is not pair.workers[name]
        pair.peers_of(decode, 1)
        pair.peers_of(prefill, 1)
        assert pair.answer(decode, tokens) == expected
        pair.check_idle(decode, prefill)
        for key, pid in others.items():
            assert pair.workers[key].process.pid == pid
            assert pair.workers[key].process.poll() is None


@pytest.mark.slow  # tests/decode/test_retry.py has it in one process
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda one: one.name)
def test_prefill_that_dies_or_stops_is_noticed_and_replaced(
    pair: Pair, tokens: list[int], number: signal.Signals
) -> None:
    decode, _ = serving(pair, "push")
    expected = pair.answer(decode, tokens)
    pair.workers["prefill-a"].process.send_signal(number)
    sent = pair.send(decode, tokens)
    pair.until(lambda: pair.router.status(decode).values["blocks_used"] > 0)
    begun = time.monotonic()
    pair.until(lambda: pair.router.status(decode).values["peers"] == 0)
    assert time.monotonic() - begun < 4, "peer_timeout_s is 2"
    pair.until(lambda: sent.finished is not None)
    assert sent.finished is not None
    assert "peer prefill-a is lost" in sent.finished.error
    assert pair.router.status(decode).values["blocks_quarantined"] > 0
    if number == signal.SIGSTOP:
        pair.workers["prefill-a"].process.send_signal(signal.SIGCONT)
    else:
        pair.start("prefill-a")
    pair.peers_of(decode, 1)
    pair.check_idle(decode)
    assert pair.answer(decode, tokens) == expected
