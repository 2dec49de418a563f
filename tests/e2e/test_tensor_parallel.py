"""Prefill and decode workers of one and of two ranks, as processes: the tokens are those of a
single process, both ends have the same KV, and nothing is left."""

from __future__ import annotations

import json
import re
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.by_hand import HandStarted, hand_started
from support.commands import TINY_MODEL
from support.fork_server import ForkServer
from support.models import HostEngine

from kvxfer.control.cache_messages import Sleep
from kvxfer.model import inspect_model
from kvxfer.model.runner import ModelRunner
from kvxfer.model.tokenizer import Tokenizer
from kvxfer.serve.router import Router

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

NEW_TOKENS = 20
PROMPTS = (
    "x",
    "HAMLET.\nTo be, or not to be, that is the question:\n" * 3,
    "KING.\nThe night is long, and we have far to go before the morning.\n" * 12,
)
CHUNK = 128
COMMON = (
    "--device", "cpu", "--memory-budget-bytes", str(3 << 30), "--kv-digest", "always",
    "--max-num-batched-tokens", str(CHUNK), "--kv-stream-bytes", "1",
)  # fmt: skip
"""A chunk's KV travels layer by layer."""
FEW = ("--kv-initial-blocks", "8")
"""Less than the prompts need: both caches grow while KV is on its way."""


def lengths() -> list[int]:
    tokenizer = Tokenizer.load(TINY_MODEL)
    return [len(tokenizer.encode(text)) for text in PROMPTS]


CONFIG = json.loads((TINY_MODEL / "config.json").read_text())
KV_HEADS, LAYERS = CONFIG["num_key_value_heads"], CONFIG["num_hidden_layers"]
HEAD_BYTES = 4 * LAYERS * 2 * CONFIG["head_dim"]
"""KV of one token of one head in all layers, K and V."""


def token_bytes(decode: int) -> int:
    """What arrives of one token: each rank of `decode` has one head at the least."""
    return HEAD_BYTES * max(KV_HEADS, decode)


def num_chunks(num_tokens: int) -> int:
    return -(-num_tokens // CHUNK)


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    num_bytes: int
    num_pieces: int


@dataclass
class Pair:
    prefill: HandStarted
    decode: HandStarted

    def followers(self) -> list[psutil.Process]:
        both = (self.prefill.process.pid, self.decode.process.pid)
        return [child for pid in both for child in psutil.Process(pid).children()]


@contextmanager
def pair(
    directory: Path, prefill: int, decode: int, *options: str, server: ForkServer
) -> Iterator[Pair]:
    """Workers of so many ranks each, ready for each other; forked, but for their followers."""
    name = f"prefill-{secrets.token_hex(3)}"
    with ExitStack() as undo:
        more = (*COMMON, *options)
        size = ("--tensor-parallel-size", str(prefill))
        log = directory / "prefill.log"
        named = ("--worker-id", name)
        first = undo.enter_context(
            hand_started("prefill", log, *named, *size, *more, server=server)
        )
        size = ("--tensor-parallel-size", str(decode))
        log = directory / "decode.log"
        second = undo.enter_context(
            hand_started("decode", log, "--prefill", first.address, *size, *more, server=server)
        )
        second.wait_for(f"peer {name} is ready", 120)
        found = Pair(first, second)
        yield found
        followers = found.followers()
        assert len(followers) == prefill + decode - 2
        for worker in (second, first):
            assert worker.stop() == 0, worker.text
            assert "Traceback" not in worker.text, worker.text
            assert "conservation" not in worker.text, worker.text
        assert not any(child.is_running() for child in followers)


def ask(router: Router, address: str) -> list[Answer]:
    """All prompts at once."""
    (backend,) = router.connect([address], 30)
    tokenizer = Tokenizer.load(TINY_MODEL)
    sent = [router.submit(backend, tokenizer.encode(text), NEW_TOKENS) for text in PROMPTS]
    deadline_s = time.monotonic() + 60
    while any(one.finished is None for one in sent):
        router.poll(0.01)
        assert time.monotonic() < deadline_s
    answers = []
    for one in sent:
        assert one.finished is not None
        assert (one.finished.error, one.finished.reason) == ("", "length")
        transfer = one.finished.transfer
        answers.append(Answer(one.output, transfer.num_bytes, transfer.num_tickets))
    return answers


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What one process says, with plain memory."""
    runner = ModelRunner.load(inspect_model(TINY_MODEL), "cpu", "float32", 1)
    try:
        engine, answers = HostEngine(runner), []
        tokenizer = Tokenizer.load(TINY_MODEL)
        for text in PROMPTS:
            sequence = engine.prefill(tokenizer.encode(text), range(1, 64), 128)
            engine.decode([sequence], NEW_TOKENS - 1)
            answers.append(sequence.answer)
        return answers
    finally:
        runner.close()


CASES = [
    pytest.param(1, 2, "push", "nixl", id="1 to 2, pushed", marks=pytest.mark.slow),
    pytest.param(2, 1, "pull", "nixl", id="2 to 1, pulled", marks=pytest.mark.slow),
    pytest.param(2, 2, "push", "nixl", id="2 to 2, pushed", marks=pytest.mark.slow),
    pytest.param(2, 1, "push", "nixl", id="2 to 1, pushed", marks=pytest.mark.slow),
    pytest.param(1, 2, "pull", "nixl", id="1 to 2, pulled", marks=pytest.mark.slow),
    pytest.param(2, 2, "pull", "peer", id="2 to 2, peer", marks=pytest.mark.slow),
    pytest.param(1, 2, "auto", "peer,nixl", id="1 to 2, any", marks=pytest.mark.slow),
    pytest.param(4, 1, "push", "nixl", id="4 to 1, pushed", marks=pytest.mark.slow),
    pytest.param(1, 4, "pull", "peer", id="1 to 4, peer", marks=pytest.mark.slow),
    pytest.param(4, 2, "pull", "nixl", id="4 to 2, pulled", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("prefill", "decode", "lane", "connector"), CASES)
def test_tokens_are_those_of_a_single_process(
    tmp_path: Path,
    expected: list[list[int]],
    fork_server: ForkServer,
    prefill: int,
    decode: int,
    lane: str,
    connector: str,
) -> None:
    options = ("--lane", lane, "--connector", connector, *FEW)
    router = Router()
    try:
        with pair(tmp_path, prefill, decode, *options, server=fork_server) as both:
            first = ask(router, both.decode.address)
            assert [one.tokens for one in first] == expected
            assert [one.num_bytes for one in first] == [token_bytes(decode) * n for n in lengths()]
            chunks = sum(map(num_chunks, lengths()))
            assert chunks < sum(one.num_pieces for one in first) <= chunks * LAYERS
            assert "generation 2" in both.decode.text, "it grew under way"
            again = ask(router, both.decode.address)  # most of it is here, in all ranks
            assert [one.tokens for one in again] == expected
            missing = [n - (n - 1) // 16 * 16 for n in lengths()]
            assert [one.num_bytes for one in again] == [token_bytes(decode) * n for n in missing]
            (source,) = router.connect([both.prefill.address], 30)
            cached = sum((n - 1) // 16 * 16 for n in lengths())
            assert router.status(source).values["prefix_cache_hit_tokens"] == cached
            expected_lane = "" if lane == "auto" else f"{connector}/{lane}"
            assert f"is ready, lane: {expected_lane}" in both.decode.text
            tried = rf"lane to \S+: {expected_lane}.* from {prefill} to {decode} ranks"
            assert re.search(tried, both.decode.text)
            assert ("also tried" in both.decode.text) == (lane == "auto")
            if decode > 1:
                (backend,) = router.connect([both.decode.address], 30)
                refused = router.manage(backend, Sleep(timeout_s=1), 30)
                assert "tensor_parallel_size" in refused.problem
    finally:
        router.close()


@pytest.mark.slow
def test_a_rank_that_dies_ends_its_worker(tmp_path: Path) -> None:
    options = ("--tensor-parallel-size", "2", *COMMON, *FEW)
    with hand_started("prefill", tmp_path / "log", *options) as worker:
        worker.wait_for("prefill INFO ready")
        (follower,) = psutil.Process(worker.process.pid).children()
        follower.send_signal(signal.SIGKILL)
        assert worker.process.wait(timeout=10) == 1
        last = worker.text.strip().splitlines()[-1]
        assert "prefill: error: rank 1 of 2" in last
        assert "SIGKILL" in last
        assert "Traceback" not in worker.text


@pytest.mark.slow
def test_a_size_that_does_not_divide_the_heads_is_refused_by_name(tmp_path: Path) -> None:
    options = ("--tensor-parallel-size", "3", *COMMON)
    with hand_started("prefill", tmp_path / "log", *options) as worker:
        assert worker.process.wait(timeout=120) == 2
        last = worker.text.strip().splitlines()[-1]
        assert last.startswith("prefill: error: tensor_parallel_size: 3: does not divide")
        assert "Traceback" not in worker.text
