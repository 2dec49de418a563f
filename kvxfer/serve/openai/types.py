"""The requests of OpenAI's API, with vLLM's additions, as they come.

A field's default is its neutral value: null means the same. `UNSUPPORTED` names the fields that are
known and not done here, with the values that ask for nothing; `IGNORED` those that change no
answer. Any other name is ignored with a warning, as vLLM does.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from kvxfer.serve.openai.errors import ApiError, refuse

logger = logging.getLogger(__name__)

MAX_WARNED = 64
"""Names of unknown fields that are warned of, once each; clients choose them."""
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_warned: set[str] = set()


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class KvTransferParams(msgspec.Struct, forbid_unknown_fields=True):
    verify: bool | None = None
    """Tell the digest of each prompt block's KV, as it arrived at the decode worker."""


class Common(msgspec.Struct):
    """What both kinds of request have. Ranges are checked by `openai_request`."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: KvTransferParams | None = None


class CompletionRequest(Common, kw_only=True):
    prompt: Any
    """See `prompts_of`."""
    echo: bool | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None


class ChatRequest(Common, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "beam_width": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_k": (0, -1),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
IGNORED = {
    "metadata",
    "parallel_tool_calls",
    "priority",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "user",
    "verbosity",
}

T = TypeVar("T", bound=Common)


def parse(body: bytes, kind: type[T]) -> T:
    """A body as a request. Raises ApiError."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    known = kind.__struct_fields__
    _check_unsupported(fields, known)
    try:
        request = msgspec.convert(fields, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _invalid(error) from error
    _warn_of_unknown([name for name in fields if name not in known])
    return request


def _check_unsupported(fields: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name, value in fields.items():
        neutral = UNSUPPORTED.get(name)
        if neutral is None or name in known or value is None:
            continue
        # True == 1 and False == 0 in Python, but not in JSON.
        if not any(value == one and isinstance(value, bool) is isinstance(one, bool)
                   for one in neutral):  # fmt: skip
            raise ApiError(
                400, f"{name} is not supported here", param=name, code="unsupported_parameter"
            )


def _invalid(error: msgspec.ValidationError) -> ApiError:
    text = str(error)
    found = _PATH.search(text)
    where = found.group(1) if found else ""
    reason = text[: found.start()] if found else text
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", reason):
        where = f"{where}.{missing.group(1)}".lstrip(".")
        return ApiError(400, f"{where}: is required", param=where)
    if unknown := re.fullmatch(r"Object contains unknown field `(.+)`", reason):
        where = f"{where}.{unknown.group(1)}".lstrip(".")
        return ApiError(400, f"{where}: is not supported here", param=where)
    return ApiError(400, f"{where}: {reason[:1].lower()}{reason[1:]}", param=where or None)


def _warn_of_unknown(names: list[str]) -> None:
    for name in names:
        if name in UNSUPPORTED or name in IGNORED or name in _warned:
            continue
        if len(_warned) < MAX_WARNED:
            _warned.add(name)
            logger.warning("ignored a request's field %.80r, which is not known here", name)


def prompts_of(prompt: Any) -> list[str] | list[list[int]]:
    """The prompts of a completion request, one or more. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(one, str) for one in prompt):
            return prompt
        if _is_tokens(prompt):
            return [prompt]
        if all(isinstance(one, list) and one and _is_tokens(one) for one in prompt):
            return prompt
    reason = "must be a text, a list of texts, a list of tokens, or a list of those"
    raise refuse("prompt", prompt, reason)


def _is_tokens(found: list[Any]) -> bool:
    return all(type(one) is int for one in found)
