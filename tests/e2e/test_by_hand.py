"""Workers started by hand, as the README tells: they find each other, serve, refuse strangers.

The first pair is started so; further decode workers are forked from a process that has imported
what they need.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.by_hand import HandStarted, hand_started
from support.commands import KVXFER, TINY_MODEL, run
from support.fork_server import ForkServer
from support.models import HostEngine

from kvxfer.control.cache_messages import Defragment, Sleep, WakeUp
from kvxfer.control.channel import Channel
from kvxfer.control.messages import WIRE_VERSION, Hello, Reject
from kvxfer.model import inspect_model
from kvxfer.model.runner import ModelRunner
from kvxfer.model.tokenizer import Tokenizer
from kvxfer.serve.router import Router
from kvxfer.transfer.digest import block_digests


@pytest.fixture(scope="module")
def prefill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HandStarted]:
    log = tmp_path_factory.mktemp("prefill") / "log"
    with hand_started("prefill", log, "--worker-id", "prefill-a") as worker:
        yield worker
        assert worker.process.poll() is None, "no stranger ends it"
        asked_at = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - asked_at < 2
        assert "Traceback" not in worker.text


@pytest.fixture(scope="module")
def alone() -> Iterator[HostEngine]:
    """The same model in this process, with plain memory."""
    runner = ModelRunner.load(inspect_model(TINY_MODEL), "cpu", "float32", 1)
    yield HostEngine(runner)
    runner.close()


@pytest.fixture
def stranger(prefill: HandStarted) -> Iterator[Channel]:
    channel = Channel("stranger.1")
    yield channel
    channel.close()


def ask(channel: Channel, address: str, hello: Hello) -> object:
    key = channel.dial(address)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not channel.poll(0.1):
            try:
                channel.send(key, hello)
                break
            except Exception as error:
                assert "cannot send" in str(error)
    while time.monotonic() < deadline:
        for letter in channel.poll(0.1):
            return letter.message
    raise AssertionError("no answer")


@pytest.mark.slow  # tests/worker/test_handshake.py says it of workers in one process
def test_another_wire_version_is_refused_by_name(prefill: HandStarted, stranger: Channel) -> None:
    prefill.wait_for("ready")
    answer = ask(stranger, prefill.address, Hello(wire_version=99, facts=None))
    assert isinstance(answer, Reject)
    assert (answer.field, answer.ours, answer.theirs) == ("wire_version", "99", str(WIRE_VERSION))


def test_a_pair_started_by_hand_serves_prompts(prefill: HandStarted, tmp_path: Path) -> None:
    with hand_started(
        "decode", tmp_path / "log", "--prefill", prefill.address, "--kv-cache-layout", "BHLNC"
    ) as decode:
        decode.wait_for("peer prefill-a is ready")
        ask_router = (*KVXFER, "complete", "--model", str(TINY_MODEL), "--decode", decode.address)
        prompt = "HAMLET.\nTo be, or not to be: that is the question:\n"
        answers = [
            run(*ask_router, "--prompt", prompt, "--max-new-tokens", "24", *more)
            for more in ((), (), ("--temperature", "0.9", "--seed", "1"))
        ]
        for answer in answers:
            assert answer.code == 0, answer
            assert answer.err == ""
            assert len(answer.out.strip()) > 10
        assert answers[0].out == answers[1].out
        assert answers[2].out != answers[0].out
        too_long = run(*ask_router, "--prompt", "word " * 500)
        too_long.check_one_clear_line(1, "2048")
        wrong = run(*ask_router, "--prompt", "x", "--top-p", "0")
        wrong.check_one_clear_line(2, "top_p", "0")
        assert decode.stop() == 0


def test_sleep_and_wake_of_either_side_change_no_token(
    prefill: HandStarted, tmp_path: Path, fork_server: ForkServer
) -> None:
    """Over real NIXL: pages go, peers learn of it, prompts are refused, and all comes back."""
    tokens = Tokenizer.load(TINY_MODEL).encode("HAMLET.\nTo be, or not to be, that is the " * 8)
    tokens = tokens[:270]  # a whole chunk will be cached: no bit depends on it
    dial = ("--prefill", prefill.address)
    with hand_started("decode", tmp_path / "log", *dial, server=fork_server) as decode:
        decode.wait_for("peer prefill-a is ready")
        router = Router()
        try:
            backends = router.connect([decode.address, prefill.address], 30)

            def answer() -> tuple[list[int], list[str], str]:
                completion = router.submit(backends[0], tokens, 16, verify=True)
                deadline = time.monotonic() + 60
                while completion.finished is None:
                    router.poll(0.01)
                    assert time.monotonic() < deadline
                finished = completion.finished
                return completion.output, finished.kv_digests, finished.error

            def hits() -> int:
                return int(router.status(backends[1]).values["prefix_cache_hit_tokens"])

            before, known = answer(), hits()
            assert len(before[0]) == 16
            assert answer() == before
            assert hits() - known == 256, "all but the end was cached"
            for sleeper in backends:
                slept = router.manage(sleeper, Sleep(timeout_s=10), 30)
                assert (slept.problem, slept.is_sleeping) == ("", True)
                assert router.status(sleeper).values["committed_bytes"] == 0
                assert router.status(sleeper).values["registered_bytes"] == 0
                assert "the cache sleeps" in answer()[2]
                woken = router.manage(sleeper, WakeUp(), 30)
                assert (woken.problem, woken.is_sleeping) == ("", False)
                known = hits()
                assert answer() == before
                assert hits() - known == (0 if sleeper is backends[1] else 256)
            packed = router.manage(backends[0], Defragment(timeout_s=10), 30)
            assert packed.problem == ""
            assert answer() == before
            for backend in backends:
                values = router.status(backend).values
                assert values["committed_bytes"] == values["registered_bytes"] > 0
                assert values["blocks_used"] == values["blocks_quarantined"] == 0
        finally:
            router.close()
        assert decode.stop() == 0


@pytest.mark.slow  # tests/prefill/test_prefix_cache.py has more of it in one process
def test_what_prefill_computed_before_it_does_not_compute_again(
    prefill: HandStarted, tmp_path: Path, alone: HostEngine
) -> None:
    """KV and tokens are those of a process that knows nothing from before. Bits are sure to be the
    same where the cached part is whole chunks, of 256 tokens: else only tokens are compared."""
    text = "KING.\nThe night is long, and we have far to go " * 8
    tokens = Tokenizer.load(TINY_MODEL).encode(text)
    prompts = [tokens[:270], tokens[:270], [*tokens[:256], *tokens[7:200]], tokens[:100]]
    with hand_started("decode", tmp_path / "log", "--prefill", prefill.address) as decode:
        decode.wait_for("peer prefill-a is ready")
        router = Router()
        try:
            backends = router.connect([decode.address, prefill.address], 30)
            before = router.status(backends[1]).values
            for prompt, cached in zip(prompts, [0, 256, 256, 96], strict=True):
                completion = router.submit(backends[0], prompt, 16, verify=True)
                deadline = time.monotonic() + 60
                while completion.finished is None:
                    router.poll(0.01)
                    assert time.monotonic() < deadline
                sequence = alone.prefill(prompt, range(1, 40), 256)
                alone.decode([sequence], 15)
                assert completion.output == sequence.answer
                if cached % 256 == 0:
                    (table,), (views,) = sequence.tables, alone.views
                    blocks = table.ids(range(-(-len(prompt) // 16)))
                    expected = block_digests(views, blocks, len(prompt))
                    assert completion.finished.kv_digests == expected
                values = router.status(backends[1]).values
                hits = (int(v["prefix_cache_hit_tokens"]) for v in (values, before))
                assert next(hits) - next(hits) == cached
                before = values
            states = ("blocks_free", "blocks_used", "blocks_quarantined", "prefix_cache_blocks")
            held = [int(before[state]) for state in states]
            assert sum(held) + 1 == before["blocks_total"]
            assert held[1:3] == [0, 0]
            assert held[3] >= 270 // 16
        finally:
            router.close()
        assert decode.stop() == 0


def test_another_model_is_refused_by_name(
    prefill: HandStarted, tmp_path: Path, fork_server: ForkServer
) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY_MODEL, model, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    dial = ("--prefill", prefill.address)
    with hand_started("decode", tmp_path / "log", *dial, model=model, server=fork_server) as decode:
        assert decode.process.wait(timeout=60) == 1
        last = decode.text.strip().splitlines()[-1]
    assert last.startswith("decode: error: ")
    assert "model differs" in last
    assert "Traceback" not in decode.text


def test_a_router_that_finds_nobody_says_so() -> None:
    started = time.monotonic()
    done = run(
        *KVXFER, "complete", "--model", str(TINY_MODEL), "--decode", "tcp://127.0.0.1:9",
        "--prompt", "x", "--connect-timeout-s", "1",
    )  # fmt: skip
    done.check_one_clear_line(1, "tcp://127.0.0.1:9", "no answer")
    assert time.monotonic() - started < 10
