"""`kvxfer bench serving` against services that run: one that misbehaves as told, and ours."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fake_openai import STREAM, FakeOpenAI, event, head, tokens, usage, whole
from support.http_service import HttpService

from kvxfer.bench.serving.options import CHAT, ServingOptions
from kvxfer.bench.serving.run import run_serving
from kvxfer.errors import KvxferError, UsageError, WorkerDied

DONE = b"data: [DONE]\n\n"


def options(url: str, **more: Any) -> ServingOptions:
    small = {
        "base_url": url, "num_prompts": 6, "random_input_len": 8, "random_output_len": 4,
        "runs": 2, "num_warmups": 1, "request_timeout_s": 20.0,
    }  # fmt: skip
    return ServingOptions(**(small | more))


def figures(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    return {one["metric"].removeprefix("serving, service: "): one for one in found}


def test_it_asks_for_what_was_told_and_counts_what_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hidden-key")
    path = tmp_path / "serving.json"
    with FakeOpenAI() as fake:
        told = options(fake.url + "/v1/", max_concurrency=2, goodput=("ttft:10000",), json=path)
        assert run_serving(told) == 0
    assert len(fake.asked) == 2 * (6 + 1) and fake.most_at_once == 2
    assert fake.keys == {"bearer hidden-key"}
    assert {len(one["prompt"]) for one in fake.asked} == {8}
    known = {"max_tokens": 4, "ignore_eos": True, "return_token_ids": True, "model": "fake"}
    for name, value in {**known, "stream_options": {"include_usage": True}}.items():
        assert [one[name] for one in fake.asked] == [value] * 14
    found = figures(path)
    assert found["of 12 requests failed"]["value"] == 0
    assert found["rounds that were whole"]["value"] == 2
    assert found["ttft, p99"]["runs"] == 2 and found["ttft, p99"]["value"] >= 0
    rates = {one: found[f"throughput, {one}"]["value"] for one in ("requests", "output tokens")}
    assert rates["output tokens"] == pytest.approx(4 * rates["requests"])
    assert found["throughput, all tokens"]["value"] == pytest.approx(12 * rates["requests"])
    assert found["goodput, requests"]["value"] == pytest.approx(rates["requests"])
    out, err = capsys.readouterr()
    assert "not told by this service" in out
    assert "hidden-key" not in out + err + path.read_text()


def test_a_chat_is_text_and_a_stranger_gets_no_fields_of_its_own() -> None:
    with FakeOpenAI(owned_by="somebody") as fake:
        assert run_serving(options(fake.url, endpoint=CHAT, request_rate=500.0, runs=1)) == 0
    for body in fake.asked:
        assert len(body["messages"][0]["content"].split()) == 8
        assert not {"ignore_eos", "return_token_ids", "prompt"} & set(body)


async def limited_at_first(fake: FakeOpenAI, body: Any, writer: asyncio.StreamWriter) -> None:
    if len(fake.asked) in (2, 3):
        writer.write(head(429, "Retry-After: 0.05") + b"{}")
    else:
        await whole(fake, body, writer)


@pytest.mark.parametrize("honors", [False, True])
def test_429_fails_or_is_sent_again_and_is_counted_either_way(tmp_path: Path, honors: bool) -> None:
    path = tmp_path / "serving.json"
    with FakeOpenAI(limited_at_first) as fake:
        told = options(fake.url, runs=1, honor_retry_after=honors, json=path)
        assert run_serving(told) == (0 if honors else 1)
    found = figures(path)
    assert found["answered 429"]["value"] == 2
    assert found["of 6 requests failed"]["value"] == (0 if honors else 2)
    if honors:
        assert found["ttft, p99"]["value"] > 50  # from the first time that it was sent
    else:
        assert found["failed, HTTP 429"]["value"] == 2


def answering(data: bytes) -> Any:
    async def answer(fake: FakeOpenAI, body: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return answer


@pytest.mark.parametrize(
    ("data", "kind", "detail"),
    [
        (head(500) + b'{"error": "worn out"}', "HTTP 500", "worn out"),
        (STREAM + tokens(4) + usage(8, 4), "cut short", "without [DONE]"),
        (STREAM + tokens(1) + event({"error": {"message": "no"}}), "error in the stream", "no"),
        (STREAM + tokens(3) + usage(8, 3) + DONE, "wrong answer", "3 tokens came, 4 were asked"),
        (STREAM + tokens(3) + usage(8, 4) + DONE, "wrong answer", "3 tokens came, usage says 4"),
        (STREAM + tokens(4) + usage(9, 4) + DONE, "wrong answer", "a prompt of 9 tokens"),
        (STREAM + tokens(4) + DONE, "wrong answer", "no usage"),
        (STREAM + b"data: {nonsense\n\n", "connection lost", "malformed"),
        (b"", "connection lost", "disconnected"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_told_by_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, kind: str, detail: str
) -> None:
    path = tmp_path / "serving.json"
    with FakeOpenAI(answering(data)) as fake:
        assert run_serving(options(fake.url, runs=1, json=path)) == 1
    found = figures(path)
    assert found[f"failed, {kind}"]["value"] == 6 and not found[f"failed, {kind}"]["ok"]
    assert found["rounds that were whole"]["value"] == 1
    assert "ttft, mean" not in found
    out = capsys.readouterr().out
    assert f"6 of 6 requests failed, {kind}: " in out and detail.lower() in out.lower()


def test_an_answer_that_never_comes_has_a_deadline(tmp_path: Path) -> None:
    async def never(fake: FakeOpenAI, body: Any, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    path = tmp_path / "serving.json"
    with FakeOpenAI(never) as fake:
        told = options(fake.url, runs=1, num_warmups=0, request_timeout_s=0.1, json=path)
        assert run_serving(told) == 1
    assert figures(path)["failed, timeout"]["value"] == 6


def test_a_service_that_dies_leaves_what_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def dying(fake: FakeOpenAI, body: Any, writer: asyncio.StreamWriter) -> None:
        if len(fake.asked) == 11:  # of the second round
            fake.die()
            return
        await whole(fake, body, writer)

    path = tmp_path / "serving.json"
    with FakeOpenAI(dying) as fake:
        told = options(fake.url, runs=3, max_concurrency=1, json=path)
        with pytest.raises(WorkerDied, match="round 2 of 3: the service is gone"):
            run_serving(told)
    found = figures(path)
    assert found["rounds that were whole"]["value"] == 1 and found["ttft, mean"]["runs"] == 1
    assert found["failed, connection lost"]["value"] == 1
    assert found["failed, not sent"]["value"] + found["failed, service gone"]["value"] == 3
    assert "1 of 3 rounds were whole" in capsys.readouterr().out


def test_ctrl_c_leaves_what_was_found(tmp_path: Path) -> None:
    async def interrupting(fake: FakeOpenAI, body: Any, writer: asyncio.StreamWriter) -> None:
        if len(fake.asked) == 4:
            import signal
            import threading

            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if len(fake.asked) >= 4:
            await asyncio.sleep(60)
        await whole(fake, body, writer)

    path = tmp_path / "serving.json"
    with FakeOpenAI(interrupting) as fake, pytest.raises(KeyboardInterrupt):
        run_serving(options(fake.url, max_concurrency=2, json=path))
    found = figures(path)
    assert found["rounds that were whole"]["value"] == 0
    assert found["failed, stopped"]["value"] == 2 and found["failed, not sent"]["value"] == 2
    assert found["throughput, requests"]["value"] > 0


def test_who_is_not_there_or_is_somebody_else_is_named() -> None:
    with (
        FakeOpenAI() as fake,
        pytest.raises(UsageError, match="model: 'other': is not served: fake"),
    ):
        run_serving(options(fake.url, model="other"))
    with pytest.raises(KvxferError, match=f"{fake.url}/v1/models: nobody answers"):
        run_serving(options(fake.url))
    with (
        FakeOpenAI(models={"hello": 1}) as fake,
        pytest.raises(KvxferError, match="no OpenAI-compatible service"),
    ):
        run_serving(options(fake.url))


def test_without_its_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(KvxferError, match=r"aiohttp is missing: pip install 'kvxfer\[bench\]'"):
        run_serving(options("http://127.0.0.1:1"))


def test_our_own_front_and_workers_are_measured(tmp_path: Path) -> None:
    """All but the model is real: every answer whole, as long as was asked for, none left over."""
    path = tmp_path / "serving.json"
    with HttpService() as service:
        told = options(
            f"http://127.0.0.1:{service.port}", random_input_len=40, request_rate=200.0, runs=1,
            json=path,
        )  # fmt: skip
        assert run_serving(told) == 0
        service.until_idle()
    found = figures(path)
    assert found["of 6 requests failed"]["value"] == 0
    assert found["throughput, output tokens"]["value"] > 0
    assert found["sent late, p99"]["unit"] == "ms"
