"""The live page over real worker processes without a model: a router and an HTTP server in a thread
of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from kvxfer.launch.local import LocalLauncher, WorkerProcess
from kvxfer.serve.completion import Completion
from kvxfer.serve.dashboard.events import Watch
from kvxfer.serve.dashboard.routes import dashboard_routes
from kvxfer.serve.front import Front
from kvxfer.serve.router import Router
from kvxfer.serve.uvicorn_server import HttpServer, bind

TIMEOUT_S = 60.0


def until(condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.02)
    return found


class LivePage:
    """A context. `do` runs something where the router lives."""

    def __init__(
        self,
        num_prefill: int = 1,
        num_decode: int = 1,
        *,
        model: str = "pattern",
        kv_bytes: int = 32 << 20,
        options: tuple[str, ...] = (),
        max_watchers: int = 16,
    ) -> None:
        self._counts = {"prefill": num_prefill, "decode": num_decode}
        self._told = [
            *("--model", model, "--device", "cpu", "--connector", "nixl"),
            *("--kv-cache-memory-bytes", str(kv_bytes), "--kv-commit", "elastic"),
            *("--kv-initial-blocks", "16", *options),
        ]
        self._undo = ExitStack()
        self._is_up = threading.Event()
        self.workers: dict[str, WorkerProcess] = {}
        self.asked: list[Completion] = []
        self.router = Router(peer_timeout_s=2.0, survives_loss=True)
        self.watch = Watch(self.router, max_watchers)
        self.front = Front(self.router)
        self.port = 0
        self._num_asked = 0
        self._max_watchers = max_watchers

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/ui"

    def __enter__(self) -> LivePage:
        with ExitStack() as undo:
            undo.callback(self.router.close)
            directory = undo.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-page-"))
            self._launcher = undo.enter_context(
                LocalLauncher(Path(directory), lambda name, text: None)
            )
            self._start("prefill", [])
            self._wait_for(lambda one: bool(one.address))
            self._start("decode", [one.address for one in self.workers.values()])
            self._wait_for(lambda one: one.is_ready)
            addresses = [one.address for one in self.workers.values()]
            self.backends = self.router.connect(addresses, TIMEOUT_S)
            num_decode = self._counts["decode"]
            for one in self.backends[: self._counts["prefill"]]:
                until(lambda one=one: self.router.status(one).values["peers"] == num_decode, "met")
            self.serve()
            undo.callback(self.stop)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _start(self, role: str, prefill: list[str]) -> None:
        for index in range(self._counts[role]):
            name = f"{role}-{index}"
            dialled = ["--prefill", *prefill] if prefill else []
            told = [*self._told, "--worker-id", name, *dialled]
            self.workers[name] = self._launcher.start(name, f"{role}.null", told)

    def _wait_for(self, is_so: Callable[[WorkerProcess], bool]) -> None:
        workers = self.workers.values()
        self._launcher.wait_for(lambda: all(map(is_so, workers)), TIMEOUT_S, "the workers")

    def serve(self) -> None:
        """Begin to, at the same port as before."""
        listener = bind("127.0.0.1", self.port)
        self.port = listener.getsockname()[1]
        self.watch = Watch(self.router, self._max_watchers)
        self.front = Front(self.router)
        self._is_up.clear()

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self._loop = asyncio.get_running_loop()
            self.front.start()
            self._is_up.set()
            yield
            self.front.close()

        app = Starlette(routes=dashboard_routes(self.router, self.watch), lifespan=lifespan)
        self._server = HttpServer(app, listener, on_shutdown=self.watch.close)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        assert self._is_up.wait(TIMEOUT_S)

    def stop(self) -> None:
        """Idempotent."""
        self._server.stop()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def do(self, run: Callable[[], Any]) -> Any:
        """What `run` returns, in the router's thread."""

        async def there() -> Any:
            return run()

        return asyncio.run_coroutine_threadsafe(there(), self._loop).result(TIMEOUT_S)

    def ask(self, num_tokens: int, max_new_tokens: int, decode: int = 0) -> Completion:
        """A prompt, for one of the decode workers."""
        self._num_asked += 1
        tokens = [(7 * self._num_asked + 13 * i) % 1000 + 1 for i in range(num_tokens)]
        backend = self.backends[self._counts["prefill"] + decode]
        self.asked.append(self.do(lambda: self.router.submit(backend, tokens, max_new_tokens)))
        return self.asked[-1]

    def finish(self) -> None:
        """All that was asked has ended, as it should."""
        until(lambda: all(one.finished for one in self.asked), "the answers")
        for one in self.asked:
            assert one.finished is not None
            assert one.finished.reason == "length", one.finished
        self.asked.clear()
