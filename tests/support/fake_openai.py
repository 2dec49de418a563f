"""A service that speaks as much of OpenAI's API as a bench asks for, and misbehaves as told: raw
bytes over sockets, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

Answer = Callable[["FakeOpenAI", dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
"""Writes the whole response to a request for a completion."""


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def head(status: int, *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} X", *lines, "Connection: close", "", ""]).encode()


STREAM = head(200, "Content-Type: text/event-stream", "X-Request-Id: cmpl-1")


def usage(prompt: int, completion: int) -> bytes:
    told = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event({"choices": [], "usage": told})


def tokens(count: int) -> bytes:
    """One event."""
    return event({"choices": [{"index": 0, "text": "x" * count, "token_ids": [1] * count}]})


async def whole(fake: FakeOpenAI, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """All that was asked for, a token an event, in pieces that end in the middle of events."""
    data = b"".join(tokens(1) for _ in range(body["max_tokens"]))
    prompt = len(body["prompt"]) if "prompt" in body else 7
    data += usage(prompt, body["max_tokens"]) + b"data: [DONE]\n\n"
    writer.write(STREAM + data[:31])
    await writer.drain()
    await asyncio.sleep(0.002)
    writer.write(data[31:])


class FakeOpenAI:
    """A context. `asked` holds the bodies that came; `answer` is who answers them."""

    def __init__(self, answer: Answer = whole, owned_by: str = "vllm", models: Any = None) -> None:
        self.answer = answer
        self.models = models or {"data": [{"id": "fake", "owned_by": owned_by}]}
        self.metrics = ""
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()
        self.most_at_once = 0
        self._at_once = 0
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> FakeOpenAI:
        self._thread.start()
        assert self._is_up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # it died, and its loop is closed
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def die(self) -> None:
        """Within the loop: nobody is answered any more, those under way are cut off."""
        self._over.set()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        server = await asyncio.start_server(self._one, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_up.set()
        await self._over.wait()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._answer(reader, writer)
        except (OSError, EOFError):
            pass  # its client left
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        self.keys.add(fields.get("authorization", ""))
        path = lines[0].split()[1]
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        if path == "/v1/models":
            writer.write(head(200) + json.dumps(self.models).encode())
        elif path == "/metrics":
            writer.write(head(200 if self.metrics else 404) + self.metrics.encode())
        else:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            self.asked.append(json.loads(body))
            try:
                await self.answer(self, self.asked[-1], writer)
                await writer.drain()
            finally:
                self._at_once -= 1
