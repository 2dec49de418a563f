"""Requests as they come, and what is refused of them."""

from __future__ import annotations

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.commands import TINY_MODEL
from support.http_service import MAX_LEN, MODEL, served_model

from kvxfer.model.tokenizer import Tokenizer
from kvxfer.serve.openai import types as openai_types
from kvxfer.serve.openai.errors import ApiError
from kvxfer.serve.openai.request import Ask, ask_of
from kvxfer.serve.openai.types import UNSUPPORTED, ChatRequest, CompletionRequest, parse
from kvxfer.serve.served import Limits

SERVED = served_model()
LIMITS = Limits(max_concurrent_requests=8, max_n=4)
MESSAGES = [{"role": "user", "content": "Who is there?"}]


def ask(kind: type[CompletionRequest] | type[ChatRequest] = CompletionRequest, **body: Any) -> Ask:
    body = {"model": MODEL} | body
    body.setdefault(*(("messages", MESSAGES) if kind is ChatRequest else ("prompt", "To be")))
    request = parse(json.dumps(body).encode(), kind)
    with ThreadPoolExecutor(1) as executor:
        return asyncio.run(ask_of(request, SERVED, LIMITS, executor))


def refused(kind: type[CompletionRequest] | type[ChatRequest], **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(kind, **body)
    assert caught.value.message.isprintable()
    return caught.value


COMPLETIONS: list[tuple[str, Any]] = [
    ("prompt", None),
    ("prompt", 7),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", ["a", 1]),
    ("prompt", [1, "a"]),
    ("prompt", [True]),
    ("prompt", [1.5]),
    ("prompt", [-1]),
    ("prompt", [260]),
    ("prompt", [1 << 70]),
    ("prompt", "x" * MAX_LEN),
    ("prompt", ["a"] * 9),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "8"),
    ("max_tokens", 1.5),
    ("max_tokens", MAX_LEN),
    ("max_tokens", 1 << 70),
    ("n", 0),
    ("n", -2),
    ("n", 5),
    ("n", 10**30),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_p", -1),
    ("seed", -1),
    ("seed", 1 << 64),
    ("seed", 0.5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", list("abcde")),
    ("stop", 3),
    ("stop", "x" * 2000),
    ("stop_token_ids", [260]),
    ("stop_token_ids", [-1]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("model", 3),
    ("kv_transfer_params.do_remote_decode", None),
]


@pytest.mark.parametrize(("name", "value"), COMPLETIONS, ids=lambda one: str(one)[:20])
def test_a_value_that_is_wrong_is_refused_by_name(name: str, value: Any) -> None:
    body = {name: value}
    if name.startswith("kv_transfer_params."):
        body = {"kv_transfer_params": {name.partition(".")[2]: True}}
    error = refused(CompletionRequest, **body)
    assert error.status == 400
    assert error.param is not None
    assert error.param.startswith(name)
    assert name in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "hello",
        [],
        [{}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "tool", "content": "4", "tool_call_id": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": "x" * MAX_LEN}],
    ],
    ids=repr,
)
def test_messages_that_are_wrong_are_refused(messages: Any) -> None:
    error = refused(ChatRequest, messages=messages)
    assert error.status == 400
    assert (error.param or "").startswith("messages")


@pytest.mark.parametrize("name", sorted(set(UNSUPPORTED) - {"echo"}))
def test_what_is_not_done_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    for neutral in (None, *UNSUPPORTED[name]):
        ask(ChatRequest, **{name: neutral})
    error = refused(ChatRequest, **{name: {"some": "thing"}})
    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
    if any(type(one) is int for one in UNSUPPORTED[name]):
        assert refused(ChatRequest, **{name: 0.5}).param == name
        assert refused(ChatRequest, **{name: False}).param == name, "false is no number"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b'"x"']
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body, CompletionRequest)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_another_model_is_not_found() -> None:
    error = refused(CompletionRequest, model="gpt-4")
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")


def test_unknown_fields_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    openai_types._warned.clear()
    with caplog.at_level(logging.WARNING):
        assert ask(surprise=1, user="me") == ask(surprise=2, metadata={})
    assert [record.getMessage() for record in caplog.records] == [
        "ignored a request's field 'surprise', which is not known here"
    ]


def test_defaults_are_openais() -> None:
    completion, chat = ask(), ask(ChatRequest)
    assert [prompt.max_new_tokens for prompt in completion.prompts] == [16]
    assert chat.prompts[0].max_new_tokens == MAX_LEN - len(chat.prompts[0].tokens)
    assert (completion.sampling.temperature, completion.sampling.top_p, completion.n) == (1, 1, 1)
    seeds = {completion.sampling_of(0).seed for _ in range(20)}
    assert len(seeds) == 20, "without a seed each answer has its own"
    assert ask(seed=5).sampling_of(2).seed == 7
    assert completion.stop_token_ids == (257,)
    assert ask(ignore_eos=True, stop_token_ids=[3]).stop_token_ids == (3,)
    assert ask(prompt="x" * (MAX_LEN - 5)).prompts[0].max_new_tokens == 4
    assert ask(ChatRequest, max_completion_tokens=9, max_tokens=7).prompts[0].max_new_tokens == 9


def test_a_chat_is_rendered_once_with_its_special_tokens() -> None:
    tokenizer = Tokenizer.load(TINY_MODEL)
    parts = [{"type": "text", "text": "Who"}, {"type": "text", "text": "is there?"}]
    found = ask(ChatRequest, messages=[{"role": "user", "content": parts}])
    text = "USER.\nWho\nis there?\n\nASSISTANT.\n"
    assert found.prompts[0].tokens == tokenizer.encode(text)
    assert found.prompts[0].tokens.count(256) == 1
    without = ask(ChatRequest, add_generation_prompt=False)
    assert tokenizer.decode(without.prompts[0].tokens) == "USER.\nWho is there?\n\n"


def test_prompts_of_all_forms() -> None:
    for form in ("To be", ["To be"]):
        assert [one.tokens for one in ask(prompt=form).prompts] == [[256, *b"To be"]]
    for tokens in ([1, 2], [[1, 2]]):
        assert [one.tokens for one in ask(prompt=tokens).prompts] == [[1, 2]]
    assert ask(prompt=[[1], [2]], n=3).num_answers == 6
