"""One request for answers, from its body to its last byte.

| step | what                                                           | refused with       |
| ---  | ---                                                            | ---                |
| 1    | read the body, within its bound and its deadline               | 408, 413           |
| 2    | fields, ranges, chat template, tokens                          | 400, 404           |
| 3    | count its answers                                              | 429                |
| 4    | send them to the workers                                       | 503                |
| 5    | wait for the first news: what fails by then has a status       | 429, 500, 503      |
| 6    | a whole body, or events as tokens come; what fails is an event |                    |

A client that leaves at any step ends it: what is under way is cancelled on both workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import Executor

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from kvxfer.serve.admission import Admission
from kvxfer.serve.front import Front
from kvxfer.serve.openai.answers import Answers
from kvxfer.serve.openai.errors import ApiError, json_response
from kvxfer.serve.openai.generation import ClientGone, Generation
from kvxfer.serve.openai.request import Ask, ask_of
from kvxfer.serve.openai.sse import EventStream
from kvxfer.serve.openai.types import ChatRequest, CompletionRequest, parse
from kvxfer.serve.served import Limits, ServedModel


class GenerationEndpoint:
    """An ASGI application for one path."""

    def __init__(
        self,
        kind: type[CompletionRequest] | type[ChatRequest],
        front: Front,
        served: ServedModel,
        limits: Limits,
        admission: Admission,
        executor: Executor,
    ) -> None:
        self._kind = kind
        self._prefix = "chatcmpl" if kind is ChatRequest else "cmpl"
        self._front = front
        self._served = served
        self._limits = limits
        self._admission = admission
        self._executor = executor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect, ClientGone):
            body = await read_body(scope, receive, self._limits)
            request = parse(body, self._kind)
            served = self._front.limited(self._served)
            ask = await ask_of(request, served, self._limits, self._executor)
            request_id = f"{self._prefix}-{secrets.token_hex(16)}"
            generation = Generation.begin(
                self._front,
                self._admission,
                ask,
                self._served.tokenizer,
                request_id,
                traceparent=dict(scope["headers"]).get(b"traceparent", b"").decode("latin-1"),
            )
            try:
                async with _watched(receive, generation):
                    answers = Answers(request_id, self._served.name, ask, self._echoed(ask))
                    if ask.streams:
                        await self._stream(ask, generation, answers, request_id, send)
                    else:
                        await self._whole(generation, answers, request_id, scope, receive, send)
            finally:
                generation.close()

    def _echoed(self, ask: Ask) -> list[str]:
        if not ask.echo:
            return [""] * len(ask.prompts)
        decode = self._served.tokenizer.decode
        return [decode(one.tokens) if one.text is None else one.text for one in ask.prompts]

    async def _whole(
        self,
        generation: Generation,
        answers: Answers,
        request_id: str,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        while not generation.is_over:
            for delta in await generation.news():
                answers.add(delta)
        body = answers.whole(generation.answers)
        await json_response(body, headers={"X-Request-Id": request_id})(scope, receive, send)

    async def _stream(
        self, ask: Ask, generation: Generation, answers: Answers, request_id: str, send: Send
    ) -> None:
        events = EventStream(send, [(b"x-request-id", request_id.encode())])
        try:
            while not generation.is_over:
                deltas = await generation.news()
                await events.write(*(body for one in deltas for body in answers.chunks(one)))
        except ApiError as error:
            if not events.has_begun:
                raise
            await events.write(error.body())
            await events.end(is_whole=False)
            return
        if ask.streams_usage:
            await events.write(answers.usage_chunk(generation.answers))
        await events.end(is_whole=True)


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """All of it. Raises ApiError 413 and 408, and ClientDisconnect."""
    most = limits.max_body_bytes
    too_big = ApiError(413, f"the body is larger than {most} bytes", code="body_too_large")
    stated = dict(scope["headers"]).get(b"content-length", b"0")
    if stated.isdigit() and int(stated) > most:
        raise too_big
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.request_body_timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise too_big
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError as error:
        reason = f"the body did not come within {limits.request_body_timeout_s:g} s"
        raise ApiError(408, reason, headers={"Connection": "close"}) from error


@contextlib.asynccontextmanager
async def _watched(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    """Ends `generation` when the client leaves."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.client_left()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.wait([watcher])
