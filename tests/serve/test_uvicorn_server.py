"""The server in the current thread: its socket, its end."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

import pytest
from starlette.applications import Starlette

from kvxfer.errors import KvxferError, UsageError
from kvxfer.serve.uvicorn_server import HttpServer, bind


def test_what_cannot_be_bound_is_one_clear_line() -> None:
    with bind(port=0) as first:
        port = first.getsockname()[1]
        with pytest.raises(
            UsageError, match=rf"^port: '127\.0\.0\.1:{port}': cannot bind: .*in use"
        ):
            bind(port=port)
    wrong = [("no such host.", 0, "host"), ("192.0.2.1", 0, "port")]
    for host, number, field in (*wrong, ("", -1, "port"), ("", 65536, "port")):
        with pytest.raises(UsageError) as caught:
            bind(host, number)
        assert caught.value.field == field


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_returns_to_the_caller(number: signal.Signals) -> None:
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    listener, ended = bind(port=0), []
    server = HttpServer(Starlette(), listener, on_shutdown=lambda: ended.append(True))
    killer = threading.Timer(0.2, os.kill, (os.getpid(), number))
    killer.start()
    began = time.monotonic()
    server.run()
    assert time.monotonic() - began < 2
    killer.join()
    assert ended == [True]
    assert listener.fileno() == -1
    assert {one: signal.getsignal(one) for one in before} == before


def test_what_its_tick_raises_ends_it_and_comes_out() -> None:
    def tick() -> None:
        raise KvxferError("a worker died")

    with pytest.raises(KvxferError, match="a worker died"):
        HttpServer(Starlette(), bind(port=0), tick=tick).run()


def test_a_client_that_reads_nothing_does_not_hold_up_the_end() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        server.stop()
        await send({"type": "http.response.body", "body": bytes(10 << 20)})

    listener = bind(port=0)
    server = HttpServer(app, listener)
    with socket.create_connection(listener.getsockname()) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        began = time.monotonic()
        server.run()
        assert time.monotonic() - began < 4
        received = 0
        while part := client.recv(1 << 20):
            received += len(part)
        assert received < 5 << 20, "the rest is dropped with its connection"
