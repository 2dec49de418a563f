"""HTTP clients that cost little, so that what they measure is the server's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

READ_TIMEOUT_S = 120.0
NAME = "none"
"""Of the model, as `overhead_front` serves it."""


@dataclass(slots=True)
class Answered:
    """One streaming completion as its client saw it. Times in seconds."""

    status: int = 0
    first_byte_s: float = 0.0
    """From the request's last byte to the first of the answer."""
    took_s: float = 0.0
    num_events: int = 0
    is_whole: bool = False
    """It ended with [DONE]."""
    retry_after_s: int = 0
    error: str = ""


class Client:
    """One connection that is kept."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, address: str) -> Client:
        host, _, port = address.partition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def stream(
        self,
        model: str,
        tokens: list[int],
        max_tokens: int,
        begun: Callable[[], None] = lambda: None,
    ) -> Answered:
        """Ask, and read to the end; what goes wrong is in `error`. `begun` is called when the first
        byte is here."""
        ask = {"model": model, "prompt": tokens, "max_tokens": max_tokens, "stream": True}
        body = json.dumps({**ask, "temperature": 0, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        found, began_s = Answered(), time.monotonic()
        self._writer.write(head.encode() + body)
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                first = await self._reader.readexactly(1)
                found.first_byte_s = time.monotonic() - began_s
                begun()
                await self._read(found, first)
        except (OSError, EOFError, TimeoutError) as error:
            found.error = f"{type(error).__name__}: {error}"
        found.took_s = time.monotonic() - began_s
        return found

    async def _read(self, found: Answered, first: bytes) -> None:
        head = first + await self._reader.readuntil(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        found.status = int(lines[0].split()[1])
        fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        found.retry_after_s = int(fields.get("retry-after", 0))
        if "content-length" in fields:
            await self._reader.readexactly(int(fields["content-length"]))
            return
        last = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            last = (await self._reader.readexactly(size + 2))[:-2]
            found.num_events += last.count(b"data: ")
        await self._reader.readexactly(2)
        found.is_whole = last.endswith(b"data: [DONE]\n\n")

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()
