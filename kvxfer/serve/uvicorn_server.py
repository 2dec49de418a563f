"""Runs an ASGI application in the current thread, on uvicorn.

Facts relied on (uvicorn 0.54, read and run): a connection whose application is done is closed with
what waits to be sent still in its buffer, and lives until the client takes that; a client that
says nothing, or never ends a head or a body, is waited for without a deadline; a signal that ended
the server is raised again afterwards, which would end the process before its owner cleans up. So
connections are looked through twice a second, and signals are taken here.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvxfer.errors import UsageError

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
BACKLOG = 2048
SEND_BUFFER_BYTES = 64 << 10
"""Of a connection in the kernel, which else keeps megabytes for a client that reads nothing."""
LOOK_S = 0.5
"""Between two looks at the connections."""
GRACE_S = 1
"""For answers under way, which end as errors, to reach their clients when the server ends."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str = DEFAULT_HOST, port: int = DEFAULT_PORT) -> socket.socket:
    """A listening socket, for `HttpServer`; port 0 means any. Raises UsageError."""
    if not 0 <= port <= 65535:
        raise UsageError("port", port, "must be between 0 and 65535")
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise UsageError("host", host, f"no such address: {error}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError("port", f"{host}:{port}", f"cannot bind: {error.strerror}") from error
    return listener


class HttpServer:
    """One application on one listening socket, which it owns."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        *,
        request_head_timeout_s: float = 30.0,
        write_timeout_s: float = 30.0,
        tick: Callable[[], None] = lambda: None,
        on_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        """`tick` is called ten times a second within the loop and must not block; what it raises
        ends the server and comes out of `run`. `on_shutdown` is called in the loop as soon as the
        server is to end, before the answers under way are waited for: it ends them."""
        self._listener = listener
        config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = _Server(config, tick, on_shutdown)
        self._server.bounds_s = (request_head_timeout_s, write_timeout_s)

    def run(self) -> None:
        """Serve until SIGINT, SIGTERM or `stop`; then nothing of it is left. Signals are taken in
        the main thread alone. Raises what `tick` raised."""
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._listener.close()
        if self._server.failure is not None:
            raise self._server.failure

    def stop(self) -> None:
        """Let `run` end; from any thread."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, tick: Callable[[], None], on_shutdown: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.failure: BaseException | None = None
        self.bounds_s = (0.0, 0.0)
        self._tick = tick
        self._on_shutdown = on_shutdown
        self._next_look_s = 0.0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def on_tick(self, counter: int) -> bool:
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            for connection in list(self.server_state.connections):
                if isinstance(connection, _Connection):
                    connection.look(now_s, *self.bounds_s)
        try:
            self._tick()
        except Exception as error:  # whatever the owner's own look finds, `run` raises it
            self.failure = error
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_shutdown()
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # its client takes nothing


class _Connection(H11Protocol):
    """A connection that is given up when nothing moves on it that should."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._listens_since_s = time.monotonic()
        """When the last answer was complete, or it began."""
        self._stuck_since_s: float | None = None
        self._unsent_bytes = 0

    def look(self, now_s: float, head_timeout_s: float, write_timeout_s: float) -> None:
        """End it when its client neither asks nor takes what was written."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering:
            self._listens_since_s = now_s
        if self._is_stuck(is_answering):
            self._stuck_since_s = self._stuck_since_s or now_s
        else:
            self._stuck_since_s = None
        is_late = now_s - self._listens_since_s > head_timeout_s
        is_stuck = self._stuck_since_s is not None and now_s - self._stuck_since_s > write_timeout_s
        if is_late or is_stuck:
            self.transport.abort()

    def _is_stuck(self, is_answering: bool) -> bool:
        """Whether bytes wait that nothing was taken of since the last look. While more may be
        written a buffer that does not shrink says nothing, unless writing is held up."""
        before, self._unsent_bytes = self._unsent_bytes, self.transport.get_write_buffer_size()
        is_held_up = self.flow.write_paused or not is_answering
        return is_held_up and self._unsent_bytes >= before > 0

    def resume_writing(self) -> None:
        self._unsent_bytes = 0  # all that counted at the last look was taken
        super().resume_writing()
