"""OpenAI's own client, unchanged, against the front."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
from support.commands import TINY_MODEL
from support.http_service import MODEL, HttpService
from support.null_runner import Reference
from support.workers import SPEC

from kvxfer.model.tokenizer import Tokenizer
from kvxfer.serve.served import Limits

pytestmark = pytest.mark.slow
openai = pytest.importorskip("openai")
TOKENIZER = Tokenizer.load(TINY_MODEL)
KEY = "sk-of-this-test"


@pytest.fixture
def service() -> Iterator[HttpService]:
    with HttpService(Limits(max_concurrent_requests=32), api_keys=(KEY,)) as service:
        yield service
        service.release()
        service.until_idle()


def client(service: HttpService, key: str = KEY, **more: object) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{service.port}/v1", api_key=key, **more)


def expected(prompt: str, num: int) -> str:
    return TOKENIZER.decode(Reference([SPEC], TOKENIZER.encode(prompt), num).tokens)


def test_completions_and_chat_streaming_and_not(service: HttpService) -> None:
    def work(at: int) -> None:
        with client(service, timeout=60) as mine:
            for turn in range(4):
                prompt = f"{at} {turn} Who is there?"
                plain = mine.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=10, temperature=0
                )
                chunks = mine.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=10, temperature=0, stream=True
                )
                streamed = "".join(chunk.choices[0].text for chunk in chunks)
                assert plain.choices[0].text == streamed == expected(prompt, 10)
                messages = [{"role": "user", "content": prompt}]
                chat = mine.chat.completions.create(
                    model=MODEL, messages=messages, max_completion_tokens=8, temperature=0
                )
                parts = mine.chat.completions.create(
                    model=MODEL, messages=messages, max_tokens=8, temperature=0, stream=True,
                    stream_options={"include_usage": True},
                )  # fmt: skip
                *told, usage = parts
                text = "".join(part.choices[0].delta.content or "" for part in told)
                whole = f"USER.\n{prompt}\n\nASSISTANT.\n"
                assert chat.choices[0].message.content == text == expected(whole, 8)
                assert usage.usage.completion_tokens == 8
                assert chat.usage.prompt_tokens == len(TOKENIZER.encode(whole))
            done.append(at)

    done: list[int] = []
    threads = [threading.Thread(target=work, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert sorted(done) == list(range(8))


def test_its_errors_are_typed(service: HttpService) -> None:
    ask = {"model": MODEL, "prompt": "x"}
    with client(service, max_retries=0) as mine:
        assert [one.id for one in mine.models.list()] == [MODEL]
        with pytest.raises(openai.BadRequestError) as bad:
            mine.completions.create(**ask, n=-1)
        assert bad.value.param == "n"
        with pytest.raises(openai.NotFoundError):
            mine.completions.create(model="other", prompt="x")
        with pytest.raises(openai.RateLimitError) as limited:
            service.hold()
            with mine.completions.create(**ask, n=31, max_tokens=200, stream=True):
                mine.completions.create(**ask, n=2)
        assert int(limited.value.response.headers["retry-after"]) >= 1
        service.release()
        service.until_idle()
        with client(service, "sk-wrong") as other, pytest.raises(openai.AuthenticationError):
            other.models.list()
        with pytest.raises(openai.APIError, match="the model is broken"):
            stream = mine.completions.create(**ask, max_tokens=900, stream=True)
            for at, _ in enumerate(stream):
                if at == 0:
                    service.decode.runner.fail_next = "the model is broken"


def test_what_it_leaves_is_cancelled(service: HttpService) -> None:
    with client(service) as mine:
        for _ in range(5):
            stream = mine.completions.create(
                model=MODEL, prompt="x" * 100, max_tokens=800, n=4, stream=True
            )
            assert len(list(itertools.islice(stream, 3))) == 3
            stream.close()
        service.until_idle()
