"""Many long answers at once in a cache that holds few of them: real processes without a model."""

import random
import time

import pytest

from kvxfer.bench.null_tokens import answer
from kvxfer.launch.local import LocalLauncher
from kvxfer.serve.router import Router

START_TIMEOUT_S = 60.0
NUM_REQUESTS = 16
MAX_NEW_TOKENS = 80
CACHE_BYTES = 256 << 10
"""32 blocks of 16 tokens; a sequence has up to 9."""


def arguments(role, *more):
    common = ("--model", "pattern", "--worker-id", f"{role}-0", "--device", "cpu")
    return [*common, "--connector", "nixl", "--no-lane-test", "--on-peer-loss", "exit", *more]


def poll_until(router, done, timeout_s):
    deadline_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline_s
        router.poll(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["all", "elastic"])
def test_all_answers_are_whole_and_right(tmp_path, leaves_nothing_behind, commit):
    with LocalLauncher(tmp_path, lambda name, text: None) as launcher:
        size = ("--kv-cache-memory-bytes", str(8 << 20))
        prefill = launcher.start("prefill", "prefill.null", arguments("prefill", *size))
        launcher.wait_for(lambda: bool(prefill.address), START_TIMEOUT_S, "prefill's address")
        size = ("--kv-cache-memory-bytes", str(CACHE_BYTES), "--kv-commit", commit)
        dial = ("--prefill", prefill.address)
        decode = launcher.start("decode", "decode.null", arguments("decode", *size, *dial))
        launcher.wait_for(lambda: decode.is_ready, START_TIMEOUT_S, "decode")
        router = Router(peer_timeout_s=30.0)
        try:
            (backend,) = router.connect([decode.address], 10.0)
            chance = random.Random(7)
            sent = []
            for _ in range(NUM_REQUESTS):
                prompt = [chance.randrange(1, 1000) for _ in range(chance.randrange(1, 60))]
                sent.append(router.submit(backend, prompt, MAX_NEW_TOKENS, verify=True))
            poll_until(router, lambda: all(one.finished for one in sent), 120.0)
            status = router.status(backend).values
        finally:
            router.close()
    for one in sent:
        assert (one.finished.reason, one.finished.error) == ("length", "")
        assert one.output == answer(one.tokens, MAX_NEW_TOKENS)
        assert len(one.finished.kv_digests) == -(-len(one.tokens) // 16)
    assert status["preemptions"] > 0
    assert (status["running"], status["waiting"], status["requests"]) == (0, 0, 0)
    assert status["blocks_used"] == 0
    assert "preempted after" in (tmp_path / "decode.log").read_text()
