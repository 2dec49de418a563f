"""OpenAI's own client against two prefill and two decode workers of the bundled model.

Every hand-over's KV is compared with the same model's in this process, by digest, and every token:
where one differs, the two likeliest next tokens must be closer than EPSILON, since batches of
another shape round otherwise. For the same reason a block may differ that was not handed over,
since decode had it: it must be one that decode wrote while it answered an earlier prompt.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.commands import TINY_MODEL
from support.running import wait_until
from support.served import Served, ask
from support.single_process import EPSILON, SingleProcess

from kvxfer.model.chat_template import ChatTemplate
from kvxfer.model.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
openai = pytest.importorskip("openai")

NUM_PROMPTS = 200
CONCURRENCY = 16
CHUNK = 32
"""Tokens of a block and of a chunk: no bit depends on how much of a prompt was cached."""
FILE = f"""
model = "{TINY_MODEL}"
port = 0
kv_cache_memory_bytes = 33554432
block_size = {CHUNK}
max_num_batched_tokens = {CHUNK}
[router]
served_model_name = "tiny"
"""


@dataclass
class Asked:
    """One request, and what came of it."""

    prompt: list[int]
    max_tokens: int
    kind: str
    output: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    pair: tuple[str, str] = ("", "")


class DecodedBlocks:
    """Whole blocks whose last tokens a decode worker computed one by one, and may have kept."""

    def __init__(self, requests: list[Asked]) -> None:
        self._found: set[Any] = set()
        for one in requests:
            tokens = [*one.prompt, *one.output[:-1]]
            first = len(one.prompt) // CHUNK + 1
            for count in range(first, len(tokens) // CHUNK + 1):
                self._found.add(_beginning(one.pair, tokens, count))

    def differing(self, asked: Asked, digests: list[str]) -> int:
        """How many of `asked`'s blocks have not the KV of `digests`: each has to be one of these,
        and the last one, which is always handed over, none."""
        pairs = enumerate(zip(asked.digests, digests, strict=True), 1)
        differing = [count for count, (ours, theirs) in pairs if ours != theirs]
        for count in differing:
            is_last = count * CHUNK >= len(asked.prompt)
            decoded = _beginning(asked.pair, asked.prompt, count) in self._found
            assert decoded and not is_last, f"block {count - 1} of {asked}"
        return len(differing)


def _beginning(pair: tuple[str, str], tokens: list[int], num_blocks: int) -> Any:
    return pair[1], tuple(tokens[: num_blocks * CHUNK])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("serve")
    (directory / "kvxfer.toml").write_text(FILE)
    options = ("--config", str(directory / "kvxfer.toml"), "--prefill", "2", "--decode", "2")
    with Served(directory, *options) as service:
        service.url()
        yield service


def client(served: Served) -> Any:
    return openai.OpenAI(base_url=served.url() + "/v1", api_key="none", timeout=120, max_retries=0)


def prompts(chance: random.Random) -> list[Asked]:
    """Of all lengths from one token to a thousand; half begin as another one does."""
    tokenizer = Tokenizer.load(TINY_MODEL)
    text = tokenizer.encode((TINY_MODEL / "excerpt.txt").read_text())
    found: list[Asked] = []
    kinds = ("completion", "completion, streamed", "chat", "chat, streamed")
    for index in range(NUM_PROMPTS):
        length = min(1000, 1 + int(chance.expovariate(1 / 150)))
        start = 997 * chance.randrange(6) % len(text)
        tokens = (text * 2)[start : start + length]
        if chance.random() < 0.5:
            tokens = [chance.randrange(256), *tokens]
        found.append(Asked(tokens, chance.randint(1, 24), kinds[index % 4]))
    return found


def send(client: Any, asked: Asked, template: ChatTemplate, tokenizer: Tokenizer) -> None:
    """By the client, as its kind says; fills in what came."""
    more = {"kv_transfer_params": {"verify": True}, "return_token_ids": True}
    common = {"model": "tiny", "temperature": 0, "extra_body": more,
              "max_tokens": asked.max_tokens, "stream": "streamed" in asked.kind}  # fmt: skip
    if asked.kind.startswith("chat"):
        text = tokenizer.decode(asked.prompt)
        messages = [{"role": "user", "content": text}]
        made = client.chat.completions.create(messages=messages, **common)
    else:
        made = client.completions.create(prompt=asked.prompt, **common)
    for part in made if common["stream"] else [made]:
        told = part.model_dump()
        for choice in told["choices"]:
            asked.output += choice.get("token_ids") or []
            asked.prompt = choice.get("prompt_token_ids") or asked.prompt
        params = told.get("kv_transfer_params")
        if params:
            asked.digests = params["kv_digests"]
            asked.pair = params["prefill"], params["decode"]
    if asked.kind.startswith("chat"):
        asked.prompt = tokenizer.encode(template.render(messages), add_special_tokens=False)


def test_many_mixed_prompts_are_answered_as_by_one_process(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = prompts(random.Random(6))
    tokenizer = Tokenizer.load(TINY_MODEL)
    template = ChatTemplate.load(TINY_MODEL)
    with client(served) as mine, ThreadPoolExecutor(CONCURRENCY) as pool:
        list(pool.map(lambda one: send(mine, one, template, tokenizer), wanted))
    single, differing = SingleProcess(CHUNK), 0
    decoded, rounded = DecodedBlocks(wanted), 0
    for one in wanted:
        answer, digests = single.answer(one.prompt, one.max_tokens, len(one.output))
        rounded += decoded.differing(one, digests)
        if one.output == answer:
            continue
        pairs = enumerate(zip(one.output, answer, strict=True))
        at = next(index for index, (ours, theirs) in pairs if ours != theirs)
        differing += 1
        gap = single.gap(one.prompt + answer[:at])
        assert gap < EPSILON, f"{one}: {answer} from token {at} on, where the gap is {gap}"
    single.runner.close()
    by_pair = Counter(one.pair for one in wanted)
    assert len(by_pair) == 4, "each with each"
    with capsys.disabled():
        blocks = sum(len(one.digests) for one in wanted)
        print(
            f"\n{len(wanted)} prompts, {blocks - rounded} of {blocks} blocks equal, the others were"
            f" decode's own; {differing} answers differ where logits are within {EPSILON:g};"
            f" pairs: {dict(by_pair)}"
        )


def test_what_is_cancelled_leaves_nothing(served: Served) -> None:
    """While it waits, prefills, moves and decodes."""
    chance = random.Random(7)

    def leave(index: int) -> None:
        with client(served) as mine:
            stream = mine.completions.create(
                model="tiny", prompt="x" * chance.randint(1, 1500), max_tokens=400, stream=True
            )
            for at, _ in enumerate(stream):
                if at >= index % 5:
                    break
            stream.close()

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        list(pool.map(leave, range(48)))

    def is_idle() -> bool:
        workers = ask(served.url() + "/status")["workers"]
        caches = [worker["cache"] for worker in workers]
        return len(caches) == 4 and not any(one["num_requests"] for one in workers) and all(
            one["blocks_used"] + one["blocks_quarantined"] == 0
            and one["blocks_free"] + one["blocks_cached"] + 1 == one["blocks_total"]
            and one["committed_bytes"] == one["registered_bytes"]
            for one in caches
        )  # fmt: skip

    wait_until(is_idle, 30, "all blocks are free")
