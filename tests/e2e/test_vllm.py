"""Two vLLM engines, a producer and a consumer, with KvxferConnector: right, whatever happens.

Needs vLLM: --vllm PYTHON, or KVXFER_VLLM_PYTHON (`deploy/vllm.sh test` makes an environment).
--vllm-connector nixl runs the same with vLLM's NixlConnector. Over TCP, as between two hosts: by
cross-memory attach a transfer needs nothing of a producer that is stopped.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvxfer.bench.vllm.client import Answer, EngineClient, EngineError
from kvxfer.bench.vllm.connectors import CONNECTORS, VllmConnector
from kvxfer.bench.vllm.engine import Engine, wait_ready
from kvxfer.bench.vllm.handover import USAGE, blocks_held, hand_over, moved_since, read_moved
from kvxfer.bench.vllm.options import VllmOptions
from kvxfer.bench.vllm.prompts import Prompts

pytestmark = pytest.mark.timeout(1200)

BLOCK, NUM_BLOCKS, NUM_NEW = 32, 256, 12
TOKEN_BYTES = 4096
"""K and V of 8 layers, 2 heads, 32 values in float32."""
START_TIMEOUT_S = 600.0
LEASE_S = 20
"""That a producer keeps blocks nobody asks for."""
ENVIRONMENT = {"UCX_TLS": "tcp", "UCX_TCP_USER_TIMEOUT": "5s"}
EXTRA = {
    "kvxfer": {"lease_timeout_s": LEASE_S, "peer_timeout_s": 10},
    "nixl": {"kv_lease_duration": LEASE_S},
}


def connector_under_test(config: pytest.Config) -> VllmConnector:
    name = config.getoption("--vllm-connector")
    connector = CONNECTORS[name]
    settings = {**connector.settings, "kv_connector_extra_config": EXTRA[name]}
    return replace(connector, settings=settings)


@dataclass
class Pair:
    producer: Engine
    consumer: Engine
    prompts: Prompts
    metrics: str

    @property
    def ends(self) -> tuple[EngineClient, EngineClient]:
        return self.producer.client, self.consumer.client

    def alone(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """What one engine answers."""
        return self.producer.client.complete(prompt, NUM_NEW).tokens

    def start(self) -> None:
        """Those that do not run."""
        for engine in (self.producer, self.consumer):
            if engine.process is None or engine.process.poll() is not None:
                engine.start()
        wait_ready((self.producer, self.consumer), START_TIMEOUT_S)

    def usage(self) -> list[float]:
        return [one.metrics()[USAGE] for one in self.ends]

    def check(self) -> None:
        """No block is held, and a new request goes from one to the other and is answered right."""
        assert [blocks_held(one, NUM_BLOCKS, 2.0 * LEASE_S) for one in self.ends] == [0, 0]
        prompt = self.prompts.next(150)
        right, before = self.alone(prompt), read_moved(self.ends[1], self.metrics)
        answer, _ = hand_over(*self.ends, prompt, NUM_NEW)
        assert answer.tokens == right
        moved = moved_since(self.ends[1], self.metrics, before)
        assert moved.transfers, "its KV was computed again, not handed over"
        assert [blocks_held(one, NUM_BLOCKS) for one in self.ends] == [0, 0]


@pytest.fixture(scope="module")
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    python = request.config.getoption("--vllm") or os.environ.get("KVXFER_VLLM_PYTHON", "")
    if not python:
        pytest.skip("needs vLLM: give --vllm PYTHON (deploy/vllm.sh test makes an environment)")
    options = VllmOptions(vllm_python=Path(python), num_gpu_blocks_override=NUM_BLOCKS)
    options.check()
    connector = connector_under_test(request.config)
    directory = tmp_path_factory.mktemp("vllm")

    def engine(name: str, role: str) -> Engine:
        return Engine(name, options, directory, connector, role, dict(ENVIRONMENT))

    pair = Pair(
        engine("producer", "kv_producer"),
        engine("consumer", "kv_consumer"),
        Prompts(options.model),
        connector.metrics,
    )
    try:
        yield pair
    finally:
        pair.producer.stop()
        pair.consumer.stop()


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    """Both run; after the test they still do what they should."""
    engines.start()
    yield engines
    engines.start()
    engines.check()


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize("length", [3, BLOCK, BLOCK + 1, 500], ids=lambda n: f"{n} tokens")
def test_tokens_and_kv_are_those_of_one_engine(pair: Pair, length: int) -> None:
    prompt = pair.prompts.next(length)
    before = [one.block_digests() for one in pair.ends]
    answer, _ = hand_over(*pair.ends, prompt, NUM_NEW)
    made = [one.block_digests() - old for one, old in zip(pair.ends, before, strict=True)]
    assert len(made[0] & made[1]) >= (length - 1) // BLOCK, "blocks of KV differ"
    assert answer.tokens == pair.alone(prompt)


@pytest.mark.parametrize(
    "lengths",
    [(40, 700, 90, 300, 5, 260), (1900,) * 6],
    ids=["mixed lengths", "more than a cache holds"],
)
def test_many_at_once(pair: Pair, lengths: Sequence[int]) -> None:
    prompts = [pair.prompts.next(length) for length in lengths]
    right = [pair.alone(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(lambda prompt: hand_over(*pair.ends, prompt, NUM_NEW)[0], prompts)
        assert [one.tokens for one in answers] == right


@pytest.mark.parametrize("known", [400, 160], ids=["full", "partial"])
def test_prefix_that_the_consumer_has(pair: Pair, known: int) -> None:
    """Only the rest is moved."""
    prompt = pair.prompts.next(400)
    right = pair.alone(prompt)
    pair.ends[1].complete(prompt[:known], 1)
    before = read_moved(pair.ends[1], pair.metrics)
    answer, _ = hand_over(*pair.ends, prompt, NUM_NEW)
    assert answer.tokens == right
    had = (known - 1) // BLOCK if known == 400 else known // BLOCK
    rest = -(-400 // BLOCK) - had
    moved = moved_since(pair.ends[1], pair.metrics, before)
    assert moved.size_bytes <= rest * BLOCK * TOKEN_BYTES


@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.2], ids=lambda s: f"after {s} s")
def test_client_goes_away_at_the_producer(pair: Pair, pause_s: float) -> None:
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    prompt = pair.prompts.next(1900)
    with pair.ends[0].abandon(prompt, 1, params, "away"):
        time.sleep(pause_s)


@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.2], ids=lambda s: f"after {s} s")
def test_client_goes_away_at_the_consumer(pair: Pair, pause_s: float) -> None:
    prompt = pair.prompts.next(1900)
    params, _ = pair.ends[0].prefill(prompt, "away")
    with pair.ends[1].abandon(prompt, 100, params, "away"):
        time.sleep(pause_s)


def test_client_goes_away_between_the_steps(pair: Pair) -> None:
    pair.ends[0].prefill(pair.prompts.next(600), "between")
    assert pair.usage()[0] > 0, "blocks are not kept for a consumer"


def test_consumer_refuses_the_request(pair: Pair) -> None:
    """Its engine never hears of it; the producer keeps nothing for it."""
    prompt = pair.prompts.next(600)
    params, _ = pair.ends[0].prefill(prompt, "refused")
    with pytest.raises(EngineError, match="400"):
        pair.ends[1].complete(prompt, 100_000, params, "refused")


def test_what_the_producer_told_is_used_twice(pair: Pair) -> None:
    """As by a proxy that tries again: the KV is gone, the answer is right."""
    prompt = pair.prompts.next(600)
    right = pair.alone(prompt)
    params, _ = pair.ends[0].prefill(prompt, "twice")
    for turn in ("first", "second"):
        assert pair.ends[1].complete(prompt, NUM_NEW, params, f"twice-{turn}").tokens == right
        pair.ends[1].reset_prefix_cache()


def ask_stopped(pair: Pair, prompt: Sequence[int], aside: ThreadPoolExecutor) -> Future[Answer]:
    """A consumer's request whose KV cannot come, since the producer is stopped."""
    params, _ = pair.ends[0].prefill(prompt, "stopped")
    pair.producer.signal(signal.SIGSTOP)
    asked = aside.submit(pair.ends[1].complete, prompt, NUM_NEW, params, "stopped")
    deadline_s = time.monotonic() + 30
    while not pair.ends[1].metrics()[USAGE]:
        assert time.monotonic() < deadline_s, "the consumer does not begin"
        time.sleep(0.05)
    time.sleep(0.5)
    return asked


def test_producer_is_killed_during_a_transfer(pair: Pair, aside: ThreadPoolExecutor) -> None:
    prompt = pair.prompts.next(1900)
    right = pair.alone(prompt)
    hand_over(*pair.ends, pair.prompts.next(100), 1)  # they know each other
    asked = ask_stopped(pair, prompt, aside)
    assert not asked.done(), "the transfer was over before"
    pair.producer.kill()
    assert asked.result(120).tokens == right
    assert blocks_held(pair.ends[1], NUM_BLOCKS) == 0


def test_producer_stops_for_a_while_during_a_transfer(
    pair: Pair, aside: ThreadPoolExecutor
) -> None:
    prompt = pair.prompts.next(1900)
    right = pair.alone(prompt)
    try:
        asked = ask_stopped(pair, prompt, aside)
        time.sleep(1.5)
    finally:
        pair.producer.signal(signal.SIGCONT)
    assert asked.result(120).tokens == right


def test_consumer_is_killed_during_a_transfer(pair: Pair, aside: ThreadPoolExecutor) -> None:
    try:
        asked = ask_stopped(pair, pair.prompts.next(1900), aside)
        pair.consumer.kill()
    finally:
        pair.producer.signal(signal.SIGCONT)
    with pytest.raises(EngineError):
        asked.result(120)


def test_producer_restarts_between_the_steps(pair: Pair) -> None:
    prompt = pair.prompts.next(700)
    right = pair.alone(prompt)
    params, _ = pair.ends[0].prefill(prompt, "restarted")
    pair.producer.kill()
    pair.start()
    assert pair.ends[1].complete(prompt, NUM_NEW, params, "restarted").tokens == right


def test_both_end_when_they_are_told_to(engines: Pair) -> None:
    """SIGTERM: nothing is left that had to be killed."""
    engines.start()
    engines.check()
    assert [engines.producer.stop(), engines.consumer.stop()] == [True, True]
