"""An ASGI application asked without a server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class _ClientLeft(OSError):
    """What a server raises in `send`."""


async def get(app: ASGIApp, path: str, until: Callable[[Answer], bool] | None = None) -> Answer:
    """The whole answer, or what came until the client had enough and left."""
    answer = Answer()
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1",
        "method": "GET", "scheme": "http", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "headers": [], "server": ("t", 80),
        "client": ("t", 1),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            answer.body += message.get("body", b"")
            if until is not None and until(answer):
                raise _ClientLeft

    with contextlib.suppress(_ClientLeft, ClientDisconnect):
        await app(scope, receive, send)
    return answer


def events_of(body: bytes) -> list[Any]:
    """The data of each whole event."""
    events = body.split(b"\n\n")[:-1]
    assert all(one.startswith(b"data: ") and b"\n" not in one for one in events)
    return [json.loads(one.removeprefix(b"data: ")) for one in events]
