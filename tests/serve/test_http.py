"""The HTTP front over real workers in this process: answers and errors. After each test nothing is
under way anywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.commands import TINY_MODEL
from support.http_service import LIMITS, MAX_LEN, MODEL, HttpService
from support.null_runner import Reference
from support.running import wait_until
from support.workers import SPEC

from kvxfer.model.tokenizer import Tokenizer

PROMPT = "Who is there?"
TOKENIZER = Tokenizer.load(TINY_MODEL)


def reference(num: int, prompt: str = PROMPT) -> Reference:
    return Reference([SPEC], TOKENIZER.encode(prompt), num)


# --- answers --------------------------------------------------------------------------------------


def test_a_completion(service: HttpService) -> None:
    expected = reference(12)
    status, body = service.ask(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, return_token_ids=True,
        kv_transfer_params={"verify": True},
    )  # fmt: skip
    (choice,) = body["choices"]
    assert (status, body["object"], choice["finish_reason"]) == (200, "text_completion", "length")
    assert choice["token_ids"] == expected.tokens
    assert choice["text"] == TOKENIZER.decode(expected.tokens)
    prompt = len(PROMPT) + 1
    usage = {"prompt_tokens": prompt, "completion_tokens": 12, "total_tokens": prompt + 12}
    assert body["usage"] == usage
    verified = body["kv_transfer_params"]
    assert verified == {
        "kv_digests": expected.digests,
        "prefill": "prefill-0",
        "decode": "decode-0",
    }


def test_a_stream_is_the_completion_in_pieces(service: HttpService) -> None:
    told, last = service.stream(
        prompt=[PROMPT, "Speak!"], max_tokens=12, n=2, temperature=0, echo=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    assert last == "[DONE]"
    *chunks, usage = told
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 48
    assert all(chunk["usage"] is None for chunk in chunks)
    texts, ends = ["", "", "", ""], []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert ends == ["length"] * 4
    prompts = [PROMPT, PROMPT, "Speak!", "Speak!"]
    assert texts == [one + TOKENIZER.decode(reference(12, one).tokens) for one in prompts]


def test_a_chat_both_ways(service: HttpService) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    expected = TOKENIZER.decode(reference(9, f"USER.\n{PROMPT}\n\nASSISTANT.\n").tokens)
    common = {"messages": messages, "max_completion_tokens": 9, "temperature": 0}
    status, body = service.ask("/v1/chat/completions", model=MODEL, **common)
    assert (status, body["object"]) == (200, "chat.completion")
    assert body["choices"][0]["message"]["content"] == expected
    told, last = service.stream("/v1/chat/completions", **common)
    assert last == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in told]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == expected


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_string_ends_it_on_both_workers(service: HttpService, streams: bool) -> None:
    whole = TOKENIZER.decode(reference(40).tokens)
    stop = whole[17:20]
    at = whole.index(stop)
    ask = {"prompt": PROMPT, "max_tokens": 800, "temperature": 0, "stop": ["no such", stop]}
    if streams:
        chunks = service.stream(**ask)[0]
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        end = chunks[-1]["choices"][0]
    else:
        end = service.ask(model=MODEL, **ask)[1]["choices"][0]
        text = end["text"]
    assert (text, end["finish_reason"], end["stop_reason"]) == (whole[:at], "stop", stop)
    service.until_idle()


def test_models_ready(service: HttpService) -> None:
    def get(path: str) -> tuple[int, Any]:
        status, _, body = service.send("GET", path)
        return status, json.loads(body)

    status, body = get("/v1/models")
    assert (status, [one["id"] for one in body["data"]]) == (200, [MODEL])
    assert body["data"][0]["max_model_len"] == MAX_LEN
    assert get(f"/v1/models/{MODEL}")[1] == body["data"][0]
    assert get("/v1/models/other")[0] == 404
    wait_until(lambda: get("/ready")[0] == 200, 5, "a status of decode")
    assert get("/ready") == (200, {"status": "ready", "prefill": 1, "decode": 1})


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405)],
)
def test_errors_of_paths_have_openais_form(
    service: HttpService, method: str, path: str, status: int
) -> None:
    got, headers, body = service.send(method, path)
    error = json.loads(body)["error"]
    assert got == status
    assert set(error) == {"message", "type", "param", "code"}
    assert path in error["message"]
    assert (status == 405) == ("allow" in headers)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b'{"prompt": "x"}', 400, "model"),
        (b'{"model": "tiny", "prompt": "x", "n": 100000}', 400, "n"),
        (b'{"model": "tiny", "prompt": "x", "max_tokens": -4}', 400, "max_tokens"),
        (b'{"model": "tiny", "prompt": "' + b"x" * MAX_LEN + b'"}', 400, "prompt"),
        (b'{"model": "other", "prompt": "x"}', 404, "model"),
        (b"x" * 100_001, 413, None),
    ],
)
def test_bad_input_is_refused_in_openais_form(
    service: HttpService, body: bytes, status: int, param: str | None
) -> None:
    got, headers, raw = service.send("POST", "/v1/completions", body)
    error = json.loads(raw)["error"]
    assert (got, error["param"]) == (status, param), error
    assert headers["content-type"] == "application/json"


def test_a_body_that_grows_too_large_without_saying_so(service: HttpService) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with service.socket(head) as connection:
        for _ in range(12):
            connection.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_what_fails_before_a_token_has_a_status_and_after_it_is_an_event(
    service: HttpService,
) -> None:
    service.decode.runner.fail_next = "the model is broken"
    status, body = service.ask(model=MODEL, prompt=PROMPT, max_tokens=40)
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert "the model is broken" in body["error"]["message"]
    with service.socket(service.post_bytes(prompt=PROMPT, max_tokens=900, stream=True)) as one:
        data = one.recv(1000)
        assert b"200 OK" in data
        service.decode.runner.fail_next = "the model is broken again"
        while not data.endswith(b"0\r\n\r\n"):
            data += one.recv(100_000)
    assert b"[DONE]" not in data
    last = data.split(b"data: ")[-1].split(b"\n\n")[0]
    assert "the model is broken again" in json.loads(last)["error"]["message"]


def test_beyond_the_bound_it_is_429_with_retry_after(service: HttpService) -> None:
    service.hold()
    common = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
    with service.socket(service.post_bytes(prompt=PROMPT, n=5, max_tokens=4)) as first:
        wait_until(lambda: service.front.num_in_flight == 5, 5, "five in flight")
        data = json.dumps(common | {"n": 2}).encode()
        status, headers, raw = service.send("POST", "/v1/completions", data)
        error = json.loads(raw)["error"]
        assert (status, error["type"]) == (429, "rate_limit_error")
        assert int(headers["retry-after"]) >= 1
        assert service.front.num_in_flight == 5
        service.release()
        assert first.recv(1000).startswith(b"HTTP/1.1 200")
    status, body = service.ask(**common, n=6)
    assert (status, len(body["choices"])) == (200, 6)


def test_api_keys() -> None:
    with HttpService(LIMITS, api_keys=("first", "sécond")) as service:
        good = ("Bearer first", "bearer sécond", "Bearer  first ")
        for header in ("", "first", "Basic first", "Bearer", "Bearer firs", "Bearer firstt", *good):
            headers = {"Authorization": header.encode()} if header else {}
            status, told, body = service.send("GET", "/v1/models", **headers)  # type: ignore[arg-type]
            assert status == (200 if header in good else 401), header
            if status == 401:
                assert json.loads(body)["error"]["code"] == "invalid_api_key"
                assert told["www-authenticate"] == "Bearer"
        assert service.send("GET", "/ready")[0] != 401
