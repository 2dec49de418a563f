"""A client of OpenAI's API that times what comes, on aiohttp.

Facts relied on (aiohttp 3.14, run): the pool is bounded at 100 connections unless told, and a
connection that the server closed while it waited in the pool is dialled anew, once, only for
methods that may be repeated: a POST ends with ServerDisconnectedError. So nothing is pooled: each
request has a connection of its own, as requests of many clients have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvxfer.bench.serving.metrics import Answer
from kvxfer.bench.serving.options import CHAT
from kvxfer.bench.serving.prompts import Prompt
from kvxfer.errors import KvxferError, UsageError

if TYPE_CHECKING:
    import aiohttp

LOOK_TIMEOUT_S = 10.0
"""For an answer about the service."""
CONNECT_TIMEOUT_S = 30.0
RETRY_AFTER_S = 1.0
"""Where a 429 does not say."""
KNOWN_OWNERS = ("kvxfer", "vllm")
"""Of models, as /v1/models says, whose services know ignore_eos and return_token_ids."""
MOST_DETAIL = 300
"""Characters that are kept of what a service said."""


class Model(msgspec.Struct):
    """One that a service lists."""

    id: str
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[Model]


class Gone(KvxferError):
    """Nobody answers where the service was."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What all requests of a run have in common."""

    url: str
    """Of the service, without a path."""
    endpoint: str
    model: str
    ignores_eos: bool
    returns_token_ids: bool
    honors_retry_after: bool
    request_timeout_s: float
    verify: bool = False

    def body(self, prompt: Prompt, text: str) -> dict[str, Any]:
        """`text` is what a chat says; a completion's prompt goes as tokens."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.num_output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == CHAT:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = prompt.tokens
        if self.ignores_eos:
            body["ignore_eos"] = True
        if self.returns_token_ids:
            body["return_token_ids"] = True
        if self.verify:
            body["kv_transfer_params"] = {"verify": True}
        return body


class Client:
    """One run's; a context of `open_client`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def model(self, url: str, name: str) -> Model:
        """The one of that name, or the first. Raises KvxferError where none answers as OpenAI's API
        does, UsageError where there is none of that name."""
        status, data = await self.look(f"{url}/v1/models")
        if status in (401, 403):
            raise KvxferError(f"{url}: answers {status}: give --api-key, or OPENAI_API_KEY")
        try:
            known = msgspec.json.decode(data, type=_Models).data if status == 200 else []
        except msgspec.MsgspecError:
            known = []
        if not known:
            told = f"/v1/models answers {status}, without models"
            raise KvxferError(f"{url}: what answers is no OpenAI-compatible service: {told}")
        for one in known:
            if name in ("", one.id):
                return one
        raise UsageError("model", name, f"is not served: {', '.join(one.id for one in known)}")

    async def look(self, url: str) -> tuple[int, bytes]:
        """Status and body of a GET. Raises Gone."""
        import aiohttp

        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S), self._session.get(url) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise Gone(f"{url}: nobody answers: {_told(error)}") from None

    async def ask(self, ask: Ask, prompt: Prompt, text: str, due_s: float) -> Answer:
        """Send it now, and read to the end. What goes wrong is in the answer's `failure`; only a
        service that nobody can connect to any more raises: Gone."""
        answer = Answer(len(prompt.tokens), prompt.num_output, due_s)
        answer.sent_s = time.monotonic()
        body = msgspec.json.encode(ask.body(prompt, text))
        try:
            async with asyncio.timeout(ask.request_timeout_s):
                while (pause_s := await self._try(ask, body, answer)) is not None:
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            answer.failure, answer.detail = "timeout", f"not within {ask.request_timeout_s:g} s"
        if not answer.failure:
            _check(ask, answer)
        return answer

    async def _try(self, ask: Ask, body: bytes, answer: Answer) -> float | None:
        """Seconds after which to try again, None if that was it."""
        import aiohttp

        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(
                ask.url + ask.endpoint, data=body, headers=headers
            ) as got:
                if got.status == 429:
                    answer.num_limited += 1
                    if ask.honors_retry_after:
                        return _seconds(got.headers.get("Retry-After", ""))
                if got.status != 200:
                    answer.failure = f"HTTP {got.status}"
                    answer.detail = (await got.text(errors="replace"))[:MOST_DETAIL]
                    return None
                answer.request_id = got.headers.get("X-Request-Id", "")
                await _read(got.content, answer)
        except aiohttp.ClientConnectorError as error:
            raise Gone(f"{ask.url}: {_told(error)}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            answer.failure, answer.detail = "connection lost", _told(error)
        return None


@asynccontextmanager
async def open_client(api_key: str) -> AsyncIterator[Client]:
    """Raises KvxferError where aiohttp is missing."""
    try:
        import aiohttp
    except ImportError:
        raise KvxferError("aiohttp is missing: pip install 'kvxfer[bench]'") from None
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers
    ) as session:
        yield Client(session)


async def _read(content: aiohttp.StreamReader, answer: Answer) -> None:
    """Events to the end of a stream: what they tell, and when they came."""
    pending, is_whole = b"", False
    async for data in content.iter_any():
        now_s = time.monotonic()
        *events, pending = (pending + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            text = b"\n".join(
                line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")
            )
            if text == b"[DONE]":
                is_whole = True
            elif text:
                _take(msgspec.json.decode(text), answer, now_s)
    if not is_whole and not answer.failure:
        answer.failure, answer.detail = "cut short", "the stream ended without [DONE]"


def _take(event: Any, answer: Answer, now_s: float) -> None:
    if not isinstance(event, dict) or "error" in event:
        answer.failure, answer.detail = "error in the stream", str(event)[:MOST_DETAIL]
        return
    for choice in event.get("choices") or ():
        ids = choice.get("token_ids") or []
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
        answer.tokens += ids
        if ids or text:
            answer.token_s.append(now_s)
    if usage := event.get("usage"):
        answer.num_output = int(usage.get("completion_tokens") or 0)
        answer.num_prompt = int(usage.get("prompt_tokens") or 0)
    if told := event.get("kv_transfer_params"):
        answer.kv_digests = list(told.get("kv_digests") or [])


def _check(ask: Ask, answer: Answer) -> None:
    """An answer that came to its end: whether it is what was asked for."""
    counted, told = len(answer.tokens), answer.num_output
    if not told:
        problem = "no usage came"
    elif ask.returns_token_ids and counted != told:
        problem = f"{counted} tokens came, usage says {told}"
    elif told > answer.num_asked or (ask.ignores_eos and told != answer.num_asked):
        problem = f"{told} tokens came, {answer.num_asked} were asked for"
    elif ask.returns_token_ids and ask.endpoint != CHAT and answer.num_prompt != answer.num_input:
        problem = (
            f"a prompt of {answer.num_prompt} tokens was counted, {answer.num_input} were sent"
        )
    elif not answer.token_s:
        problem = "no text came"
    elif ask.verify and not answer.kv_digests:
        problem = "no digest of its KV came"
    else:
        return
    answer.failure, answer.detail = "wrong answer", problem


def _seconds(text: str) -> float:
    """Of a Retry-After."""
    try:
        return min(600.0, max(0.0, float(text)))
    except ValueError:
        return RETRY_AFTER_S


def _told(error: BaseException) -> str:
    text = str(getattr(error, "os_error", None) or error)
    return text or type(error).__name__
