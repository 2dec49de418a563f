"""The HTTP front over a prefill and a decode worker, all in the test's process: real sockets, real
workers but for the model. One thread turns the workers, one runs the server."""

from __future__ import annotations

import dataclasses
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from support.cluster import Cluster
from support.commands import TINY_MODEL
from support.running import wait_until
from support.workers import make_engine

from kvxfer.model.chat_template import ChatTemplate
from kvxfer.model.loader import inspect_model
from kvxfer.model.tokenizer import Tokenizer
from kvxfer.serve.front import Front
from kvxfer.serve.http import make_app
from kvxfer.serve.router import Router
from kvxfer.serve.served import Limits, ServedModel
from kvxfer.serve.uvicorn_server import HttpServer, bind

T = TypeVar("T")
MODEL = "tiny"
CAPACITY = 512
MAX_LEN = 1024

LIMITS = Limits(
    max_concurrent_requests=6,
    max_body_bytes=100_000,
    request_head_timeout_s=1.0,
    request_body_timeout_s=1.0,
    write_timeout_s=1.0,
    health_timeout_s=0.4,
    health_cache_s=0.05,
)
"""Short deadlines."""


def served_model(**changes: Any) -> ServedModel:
    known = {
        "name": MODEL,
        "tokenizer": Tokenizer.load(TINY_MODEL),
        "info": inspect_model(TINY_MODEL),
        "max_model_len": MAX_LEN,
        "chat_template": ChatTemplate.load(TINY_MODEL),
    }
    return ServedModel(**(known | changes))


class HttpService:
    """A context. `limits`, `served` and `api_keys` are as for `make_app`; `num_each` workers of
    each role, which all know each other."""

    def __init__(
        self,
        limits: Limits | None = None,
        served: ServedModel | None = None,
        num_each: int = 1,
        **more: Any,
    ) -> None:
        self.limits = limits or Limits()
        self.served = served or served_model()
        self._more = more
        self._num_each = num_each
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_over = threading.Event()
        self._failures: list[BaseException] = []

    def __enter__(self) -> HttpService:
        self.cluster = Cluster()

        def engine(options: Any, incarnation: str) -> Any:
            made = make_engine(options, incarnation, capacity=CAPACITY, role=options.worker_id)
            info = dataclasses.replace(made.info, vocab_size=self.served.info.vocab_size)
            return dataclasses.replace(made, info=info)

        options = {"engine": engine, "max_num_batched_tokens": 256}
        self.prefill, self.decode = self.cluster.pair(**options)
        self._add_others({"lane": "push", **options})
        listener = bind(port=0)
        self.port: int = listener.getsockname()[1]
        self.router = Router(survives_loss=True, request_timeout_s=20.0)
        self.front = Front(self.router)
        limits = self.limits
        self.server = HttpServer(
            make_app(self.front, self.served, limits, **self._more),
            listener,
            request_head_timeout_s=limits.request_head_timeout_s,
            write_timeout_s=limits.write_timeout_s,
            on_shutdown=self.front.end,
        )
        self._threads = [threading.Thread(target=self._turn), threading.Thread(target=self._serve)]
        self._threads[0].start()
        self.router.connect([one.address for one in reversed(self.cluster.workers)], 10)
        self._threads[1].start()
        wait_until(lambda: self.server._server.started, 10, "the server")
        return self

    def _add_others(self, options: dict[str, Any]) -> None:
        """Each decode worker knows each prefill worker."""
        prefills, decodes = [self.prefill], [self.decode]
        for index in range(1, self._num_each):
            prefills.append(self.cluster.add("prefill", worker_id=f"prefill-{index}", **options))
            decodes.append(self.cluster.add("decode", worker_id=f"decode-{index}", **options))
        for decode in decodes:
            for prefill in prefills[1:] if decode is self.decode else prefills:
                decode.peers.dial(prefill.address)
        self.cluster.until(
            lambda: all(len(one.peers.ready()) == self._num_each for one in self.cluster.workers)
        )

    def _turn(self) -> None:
        while not self._is_over.is_set():
            while not self._calls.empty():
                self._calls.get()()
            self.cluster.turn()
            time.sleep(0.0002)

    def _serve(self) -> None:
        try:
            self.server.run()
        except BaseException as error:
            self._failures.append(error)
            raise

    def __exit__(self, *_: object) -> None:
        self.release()
        self.server.stop()
        self._threads[1].join(10)
        self._is_over.set()
        self._threads[0].join(10)
        self.router.close()
        self.cluster.close()
        assert not any(thread.is_alive() for thread in self._threads)
        assert not self._failures

    def within(self, call: Callable[[], T]) -> T:
        """Call it between two turns of the workers."""
        found: Future[T] = Future()
        self._calls.put(lambda: found.set_result(call()))
        return found.result(10)

    def hold(self) -> None:
        """Decode makes no more tokens until `release`."""
        self.decode.runner.hold()

    def release(self) -> None:
        self.decode.runner.release()
        self.prefill.runner.release()

    def until_idle(self) -> None:
        """Nothing is under way in the front, the router and both workers, and nothing is lost."""
        wait_until(lambda: self.front.num_in_flight == 0, 10, "the front")
        wait_until(lambda: not self.router._delivery.completions, 10, "the router")
        wait_until(lambda: self.within(self.cluster.idle), 10, "the workers")
        for worker in (self.prefill, self.decode):
            self.within(worker.check_conserved)

    def num_connections(self) -> int:
        return len(self.server._server.server_state.connections)

    # --- clients ------------------------------------------------------------------------------

    def ask(self, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
        """Status and decoded body of one POST."""
        status, _, data = self.send("POST", path, json.dumps(body).encode())
        return status, json.loads(data)

    def send(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def stream(self, path: str = "/v1/completions", **body: Any) -> tuple[list[Any], str]:
        """The events of one streaming POST that begins well, and what the last one held."""
        data = json.dumps({"model": MODEL, "stream": True, **body}).encode()
        status, headers, raw = self.send("POST", path, data)
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8"), raw
        return events(raw.decode())

    @contextmanager
    def socket(self, data: bytes = b"") -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.sendall(data)
            yield connection

    def post_bytes(self, path: str = "/v1/completions", **body: Any) -> bytes:
        """A whole request as it goes over the wire."""
        data = json.dumps({"model": MODEL, **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        return head.encode() + data


def events(text: str) -> tuple[list[Any], str]:
    """Bodies of events, and the text of the last."""
    assert text.endswith("\n\n"), text[-100:]
    parts = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    return [json.loads(part) for part in parts if part != "[DONE]"], parts[-1]
