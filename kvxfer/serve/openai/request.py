"""From a request as it came to what is asked of the workers: ranges checked, defaults chosen."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from kvxfer.control.router_messages import Sampling
from kvxfer.serve.openai.chat import render
from kvxfer.serve.openai.errors import ApiError, refuse
from kvxfer.serve.openai.types import ChatRequest, Common, CompletionRequest, prompts_of
from kvxfer.serve.served import Limits, ServedModel

DEFAULT_MAX_TOKENS = 16
"""Of a completion; a chat's answer may fill what the prompt leaves."""
MAX_STOPS = 4
MAX_STOP_LENGTH = 1024
"""Characters: so much of an answer may have to be held back."""
SEEDS = 1 << 64
LONG_TEXT = 1 << 14
"""Characters from which on a text is tokenized beside the loop: some milliseconds."""


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: list[int]
    text: str | None
    """As it came; None of one that came as tokens."""
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Ask:
    """One HTTP request: `n` answers to each of `prompts`."""

    prompts: list[Prompt]
    n: int
    sampling: Sampling
    """Of the first answer to a prompt; `seed` is meaningless if `is_seeded` is False."""
    is_seeded: bool
    stops: tuple[str, ...]
    includes_stop: bool
    stop_token_ids: tuple[int, ...]
    """The model's ends, too, unless they are to be ignored."""
    told_stop_ids: frozenset[int]
    """Those that the request named."""
    is_chat: bool
    streams: bool
    streams_usage: bool
    echo: bool
    verify: bool
    returns_token_ids: bool

    @property
    def num_answers(self) -> int:
        return self.n * len(self.prompts)

    def sampling_of(self, answer: int) -> Sampling:
        """Answers to one prompt differ, and are the same again for the same seed."""
        one = self.sampling
        seed = (one.seed + answer) % SEEDS if self.is_seeded else secrets.randbits(64)
        return Sampling(one.temperature, one.top_p, seed)


async def ask_of(
    request: CompletionRequest | ChatRequest,
    served: ServedModel,
    limits: Limits,
    executor: Executor,
) -> Ask:
    """`executor` runs what takes long. Raises ApiError."""
    if request.model != served.name:
        reason = f"the model {request.model[:200]!r} does not exist, {served.name!r} does"
        raise ApiError(404, reason, param="model", code="model_not_found")
    n = _between("n", request.n, 1, 1, limits.max_n)
    is_chat = isinstance(request, ChatRequest)
    prompts = await _prompts(request, served, limits.max_concurrent_requests // n, executor)
    verify = request.kv_transfer_params is not None and bool(request.kv_transfer_params.verify)
    if verify and n * len(prompts) > 1:
        raise refuse("kv_transfer_params.verify", True, "goes with one prompt and n of 1")
    options = request.stream_options
    if options is not None and not request.stream:
        raise ApiError(400, "stream_options: goes with stream alone", param="stream_options")
    extra = [_token("stop_token_ids", one, served) for one in request.stop_token_ids or ()]
    return Ask(
        prompts=prompts,
        n=n,
        sampling=_sampling(request),
        is_seeded=request.seed is not None,
        stops=_stops(request.stop),
        includes_stop=bool(request.include_stop_str_in_output),
        stop_token_ids=(*(() if request.ignore_eos else served.info.eos_token_ids), *extra),
        told_stop_ids=frozenset(extra),
        is_chat=is_chat,
        streams=bool(request.stream),
        streams_usage=options is not None and bool(options.include_usage),
        echo=isinstance(request, CompletionRequest) and bool(request.echo),
        verify=verify,
        returns_token_ids=bool(request.return_token_ids),
    )


async def _prompts(
    request: CompletionRequest | ChatRequest,
    served: ServedModel,
    max_prompts: int,
    executor: Executor,
) -> list[Prompt]:
    wanted, name = request.max_tokens, "max_tokens"
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            wanted, name = request.max_completion_tokens, "max_completion_tokens"
        found: Sequence[str | list[int]] = [render(request, served)]
    else:
        found = prompts_of(request.prompt)
    if len(found) > max_prompts:
        text = f"prompt: {len(found)} prompts: with this n at most {max_prompts} are taken"
        raise ApiError(400, text, param="prompt")
    where = "messages" if isinstance(request, ChatRequest) else "prompt"
    least_default = None if isinstance(request, ChatRequest) else DEFAULT_MAX_TOKENS
    prompts = []
    for one in found:
        tokens = await _tokens(one, where, served, executor)
        size = _answer_size(len(tokens), where, wanted, name, least_default, served)
        prompts.append(Prompt(tokens, one if isinstance(one, str) else None, size))
    return prompts


async def _tokens(
    one: str | list[int], where: str, served: ServedModel, executor: Executor
) -> list[int]:
    if not isinstance(one, str):
        for token in one:
            _token(where, token, served)
        return one

    def encode() -> list[int]:
        # A chat's template writes the special tokens itself.
        return served.tokenizer.encode(one, add_special_tokens=where != "messages")

    if len(one) < LONG_TEXT:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(executor, encode)


def _answer_size(
    num_prompt_tokens: int,
    where: str,
    wanted: int | None,
    name: str,
    default: int | None,
    served: ServedModel,
) -> int:
    """Tokens that an answer may have."""
    if num_prompt_tokens < 1:
        raise refuse(where, "", "has no tokens")
    room = served.room(num_prompt_tokens)
    longest = f"the model takes {served.max_model_len}, the answer included"
    if room < 1:
        text = f"{where}: {num_prompt_tokens} tokens are too many: {longest}"
        raise ApiError(400, text, param=where, code="context_length_exceeded")
    if wanted is None:
        return min(room, default or room)
    if wanted < 1:
        raise refuse(name, wanted, "must be at least 1")
    if wanted > room:
        text = f"{name}: {wanted}: too many after {num_prompt_tokens} tokens of {where}: {longest}"
        raise ApiError(400, text, param=name, code="context_length_exceeded")
    return wanted


def _sampling(request: Common) -> Sampling:
    temperature = 1.0 if request.temperature is None else request.temperature
    if not 0 <= temperature < math.inf:
        raise refuse("temperature", temperature, "must be 0 or more")
    top_p = 1.0 if request.top_p is None else request.top_p
    if not 0 < top_p <= 1:
        raise refuse("top_p", top_p, "must be more than 0 and at most 1")
    return Sampling(temperature, top_p, _between("seed", request.seed, 0, 0, SEEDS - 1))


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > MAX_STOPS:
        raise refuse("stop", list(stops), f"at most {MAX_STOPS} are supported")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise refuse("stop", stop, f"must have 1 to {MAX_STOP_LENGTH} characters")
    return stops


def _between(name: str, value: int | None, default: int, least: int, most: int) -> int:
    if value is None:
        return default
    if not least <= value <= most:
        raise refuse(name, value, f"must be between {least} and {most}")
    return value


def _token(name: str, token: int, served: ServedModel) -> int:
    if not 0 <= token < served.info.vocab_size:
        raise refuse(name, token, f"is no token of the vocabulary of {served.info.vocab_size}")
    return token
