"""Prefix caches of two workers, as processes over real connectors: the answers are known, and what
decode has does not travel."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.by_hand import hand_started

from kvxfer.bench.null_engine import HEAD_DIM, HEADS
from kvxfer.bench.null_tokens import MAX_LEN, NUM_LAYERS, VOCAB_SIZE, answer
from kvxfer.serve.completion import Backend
from kvxfer.serve.router import Router

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_nothing_behind")]

TOKEN_BYTES = 4 * NUM_LAYERS * HEADS * 2 * HEAD_DIM
NEW = 5
CASES = [
    pytest.param("push", "nixl", 16, 4, id="pushed, blocks of 16 to 4"),
    pytest.param("pull", "peer", 4, 16, id="pulled, 4 to 16"),
    pytest.param("pull", "nixl", 8, 8, id="pulled, 8 to 8"),
    pytest.param("push", "nixl", 4, 16, id="pushed, 4 to 16"),
]


@contextmanager
def pair(
    directory: Path, lane: str, connector: str, sizes: Sequence[int], num_blocks: int
) -> Iterator[tuple[Router, Backend]]:
    """A router to a decode worker whose cache holds `num_blocks` blocks of its own size."""
    common = (
        *("--device", "cpu", "--lane", lane, "--connector", connector, "--kv-digest", "always"),
        *("--max-num-batched-tokens", "32", "--no-lane-test"),
    )
    own = [
        ("--block-size", str(size), "--kv-cache-memory-bytes", str(num_blocks * size * TOKEN_BYTES))
        for size in sizes
    ]
    with ExitStack() as undo:
        start = lambda *told: undo.enter_context(  # noqa: E731
            hand_started(*told, model=Path("pattern"))
        )
        name = f"prefill-{random.randrange(1 << 30)}"
        prefill_log, decode_log = directory / "prefill.log", directory / "decode.log"
        first = start("prefill.null", prefill_log, "--worker-id", name, *own[0], *common)
        dial = ("--prefill", first.address)
        second = start("decode.null", decode_log, *dial, *own[1], *common)
        second.wait_for(f"peer {name} is ready", 60)
        router = Router()
        undo.callback(router.close)
        (backend,) = router.connect([second.address], 30)
        yield router, backend
        for worker in (second, first):
            assert worker.stop() == 0, worker.text
            assert "Traceback" not in worker.text, worker.text
            assert "conservation" not in worker.text, worker.text


def serve(router: Router, backend: Backend, *prompts: list[int]) -> list[int]:
    """All at once; the bytes that came for each."""
    sent = [router.submit(backend, tokens, NEW, verify=True) for tokens in prompts]
    deadline_s = time.monotonic() + 60
    while any(one.finished is None for one in sent):
        router.poll(0.01)
        assert time.monotonic() < deadline_s
    for one in sent:
        assert one.finished is not None
        assert (one.finished.error, one.output) == ("", answer(one.tokens, NEW))
    return [one.transfer.num_bytes for one in sent]


@pytest.mark.parametrize("lane, connector, prefill, decode", CASES)
def test_only_what_decode_lacks_travels(
    tmp_path: Path, lane: str, connector: str, prefill: int, decode: int
) -> None:
    chance = random.Random(f"{lane} {prefill} {decode}")
    tokens = [chance.randrange(VOCAB_SIZE) for _ in range(150)]
    with pair(tmp_path, lane, connector, (prefill, decode), 200) as (router, backend):
        assert serve(router, backend, tokens) == [150 * TOKEN_BYTES]
        cached = 149 // decode * decode
        assert serve(router, backend, tokens) == [(150 - cached) * TOKEN_BYTES]
        shares = [*tokens[:101], *range(40)]
        cached = 101 // decode * decode
        others = [[*shares, i] for i in range(6)]
        assert serve(router, backend, shares) == [(141 - cached) * TOKEN_BYTES]
        cached = 141 // decode * decode
        assert serve(router, backend, *others) == [(142 - cached) * TOKEN_BYTES] * 6
        status = router.status(backend).values
        assert status["prefix_cache_hit_tokens"] > 149 // decode * decode
        assert status["blocks_used"] == status["blocks_quarantined"] == 0
        free = int(status["blocks_free"]) + int(status["prefix_cache_blocks"]) + 1
        assert free == status["blocks_total"]


@pytest.mark.parametrize("lane, connector, prefill, decode", CASES)
def test_many_prompts_in_small_caches(
    tmp_path: Path, lane: str, connector: str, prefill: int, decode: int
) -> None:
    """What they hold is evicted all the time, and no answer is wrong."""
    chance = random.Random(f"many {lane} {prefill} {decode}")
    known = [[chance.randrange(VOCAB_SIZE) for _ in range(200)] for _ in range(4)]
    longest = (200 + 40 + NEW) * 3
    assert longest < MAX_LEN
    num_blocks = -(-longest // min(prefill, decode))
    num_bytes = num_tokens = 0
    with pair(tmp_path, lane, connector, (prefill, decode), num_blocks) as (router, backend):
        for _ in range(60):
            prompts = [
                [
                    *chance.choice(known)[: chance.randrange(200)],
                    *(chance.randrange(3) for _ in range(chance.randint(1, 40))),
                ]
                for _ in range(chance.randint(1, 6))
            ]
            num_bytes += sum(serve(router, backend, *prompts))
            num_tokens += sum(map(len, prompts))
        assert num_bytes < num_tokens * TOKEN_BYTES
        assert int(router.status(backend).values["prefix_cache_hit_tokens"]) > 0
