"""OpenAI's own client asking without a pause, by many threads, until it is told to stop.

Every answer is compared with what the workers without a model come to (`kvxfer.bench.null_tokens`),
so that a token which is lost, doubled or from another request shows. Nothing is tried again.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from support.commands import TINY_MODEL

from kvxfer.bench.null_tokens import answer
from kvxfer.model.chat_template import ChatTemplate
from kvxfer.model.loader import inspect_model
from kvxfer.model.tokenizer import Tokenizer

KINDS = ("completion", "completion, streamed", "chat", "chat, streamed")
TIMEOUT_S = 60.0
LONGEST_PROMPT, LONGEST_ANSWER = 200, 60


@dataclass
class Answered:
    """One request, and what came of it."""

    kind: str
    prompt: list[int]
    max_tokens: int
    stop: list[int]
    """Stop token ids."""
    messages: list[dict[str, str]] | None = None
    """Of a chat, whose template made them `prompt`."""
    output: list[int] = field(default_factory=list)
    reason: str = ""
    failure: str = ""
    pair: tuple[str, str] = ("", "")

    def check(self) -> None:
        """It is whole, and right."""
        assert not self.failure, self
        expected, reason = answer(self.prompt, self.max_tokens), "length"
        for at, token in enumerate(expected):
            if token in self.stop:
                expected, reason = expected[: at + 1], "stop"
                break
        assert (self.output, self.reason) == (expected, reason), self


class ClientLoad:
    """A context: `concurrency` threads ask, each with a client of its own."""

    def __init__(self, url: str, model: str, concurrency: int) -> None:
        self.answered: list[Answered] = []
        self._url = url
        self._model = model
        self._tokenizer = Tokenizer.load(TINY_MODEL)
        self._vocab_size = inspect_model(TINY_MODEL).vocab_size
        self._template = ChatTemplate.load(TINY_MODEL)
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_on, args=(number,)) for number in range(concurrency)
        ]

    def __enter__(self) -> ClientLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """What is under way is waited for: it has to end well, too."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)
        assert not any(thread.is_alive() for thread in self._threads)

    def wait_for_more(self, count: int, timeout_s: float) -> None:
        """Until so many more requests have ended."""
        wanted, deadline_s = len(self.answered) + count, time.monotonic() + timeout_s
        while len(self.answered) < wanted:
            missing = wanted - len(self.answered)
            assert time.monotonic() < deadline_s, f"{missing} of {count} not in {timeout_s:g} s"
            time.sleep(0.02)

    def check(self) -> Counter[str]:
        """All of it is whole and right; how many there were of each kind and end."""
        for one in self.answered:
            one.check()
        return Counter(f"{one.kind}: {one.reason}" for one in self.answered)

    def _ask_on(self, number: int) -> None:
        import openai

        chance = random.Random(number)
        base_url = self._url + "/v1"
        with openai.OpenAI(
            base_url=base_url, api_key="none", timeout=TIMEOUT_S, max_retries=0
        ) as client:
            while not self._is_over.is_set():
                one = self._next(chance)
                try:
                    self._send(client, one)
                except openai.OpenAIError as error:
                    one.failure = f"{type(error).__name__}: {error}"
                self.answered.append(one)

    def _next(self, chance: random.Random) -> Answered:
        length = min(LONGEST_PROMPT, 1 + int(chance.expovariate(1 / 40)))
        prompt = [chance.randrange(32, 127) for _ in range(length)]
        max_tokens = chance.randint(1, LONGEST_ANSWER)
        kind, messages = chance.choice(KINDS), None
        if kind.startswith("chat"):
            messages = [{"role": "user", "content": bytes(prompt).decode()}]
            text = self._template.render(messages)
            prompt = self._tokenizer.encode(text, add_special_tokens=False)
        could_stop = [token for token in answer(prompt, max_tokens) if token < self._vocab_size]
        stop = could_stop[:1] if chance.random() < 0.5 else []
        return Answered(kind, prompt, max_tokens, stop, messages)

    def _send(self, client: Any, one: Answered) -> None:
        more = {"return_token_ids": True, "ignore_eos": True, "stop_token_ids": one.stop,
                "kv_transfer_params": {"verify": True}}  # fmt: skip
        common = {"model": self._model, "temperature": 0, "extra_body": more,
                  "max_tokens": one.max_tokens, "stream": "streamed" in one.kind}  # fmt: skip
        if one.messages is not None:
            made = client.chat.completions.create(messages=one.messages, **common)
        else:
            made = client.completions.create(prompt=one.prompt, **common)
        for part in made if common["stream"] else [made]:
            told = part.model_dump()
            for choice in told["choices"]:
                one.output += choice.get("token_ids") or []
                one.reason = choice.get("finish_reason") or one.reason
            if params := told.get("kv_transfer_params"):
                one.pair = params["prefill"], params["decode"]
