"""The live page's events: the workers' pictures, to everybody who looks.

Workers are asked while somebody looks, all watchers together a few times a second; nobody looks:
nothing is asked. A watcher that takes its events slowly gets fewer of them, since each is made when
the one before has gone; nothing is queued for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse, Response, StreamingResponse

from kvxfer.serve.dashboard.picture import Changes, Parts, Watched, picture

if TYPE_CHECKING:
    from starlette.requests import Request

MAX_WATCHERS = 16
PERIOD_S = 0.25
FRESH_S = 1.0
"""After which what workers showed is no picture of now: nobody looked since."""
LONGEST_S = 3600.0
"""Of one stream; the page begins another one by itself."""
RETRY_AFTER_S = 5


class Watch:
    """Of one router, in the loop that drives it."""

    def __init__(
        self, router: Watched, max_watchers: int = MAX_WATCHERS, period_s: float = PERIOD_S
    ) -> None:
        self._router = router
        self._max_watchers = max_watchers
        self._period_s = period_s
        self._asked_s = 0.0
        self._parts: Parts = {}
        self._is_closing = False
        self.num_watchers = 0

    def close(self) -> None:
        """Let all streams end within a period, and begin no more."""
        self._is_closing = True

    async def endpoint(self, request: Request) -> Response:
        """GET /ui/events."""
        if self._is_closing or self.num_watchers >= self._max_watchers:
            why = "the server ends" if self._is_closing else f"{self.num_watchers} watch already"
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            return PlainTextResponse(f"{why}: try again later\n", 503, headers)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=headers)

    async def _events(self) -> AsyncIterator[bytes]:
        if self.num_watchers >= self._max_watchers:
            return  # several came at the same time
        changes = Changes()
        end_s = time.monotonic() + LONGEST_S
        self.num_watchers += 1
        try:
            self._gather()
            while not self._is_closing and time.monotonic() < end_s:
                yield b"data: " + changes.since(self._parts, time.monotonic()) + b"\n\n"
                await asyncio.sleep(self._period_s)
                self._gather()
        finally:
            self.num_watchers -= 1

    def _gather(self) -> None:
        """Once a period, however many watch: take what came, and ask anew."""
        now_s = time.monotonic()
        if now_s - self._asked_s > FRESH_S + self._period_s:
            self._router.views.clear()
        if now_s - self._asked_s >= 0.9 * self._period_s:
            self._asked_s = now_s
            self._parts = picture(self._router)
            self._router.ask_views()
