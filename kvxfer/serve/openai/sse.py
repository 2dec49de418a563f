"""Server-sent events, as OpenAI's clients read them, and what bounds a slow reader.

What is written waits for the client in the server's buffer of the connection (64 KiB), then in
`send`: until the client takes it nothing more becomes text, and tokens wait as numbers. A client
that takes nothing at all is given up by the server (`uvicorn_server`), and `send` returns.
"""

from __future__ import annotations

import msgspec
from starlette.types import Send

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"


def event(body: object) -> bytes:
    """One event: JSON has no line breaks of its own."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class EventStream:
    """One response. It ends with [DONE], or without if something went wrong, so that nobody takes
    what came for the whole."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = [*HEADERS, *headers]
        self.has_begun = False
        """Whether a status was sent: what goes wrong from now on is an event."""

    async def write(self, *bodies: object) -> None:
        """Send events in one piece."""
        data = b"".join(map(event, bodies))
        if not self.has_begun:
            self.has_begun = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": self._headers}
            )
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, *, is_whole: bool) -> None:
        """The last words: [DONE] of an answer that is whole."""
        await self._send({"type": "http.response.body", "body": DONE if is_whole else b""})
