"""One request to an ASGI application, in this thread, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message


@dataclass(frozen=True)
class Answered:
    code: int
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


def ask(
    app: ASGIApp, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = {}
) -> Answered:
    """Its answer, whole."""
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": path,
        "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    content = b"".join(one.get("body", b"") for one in sent)
    return Answered(next(one["status"] for one in sent if "status" in one), content)
