"""Bad input over real connections: all is answered with a 4xx in OpenAI's form, the connection goes
on where it can, and nothing is left: no request, block, connection, descriptor or thread."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
from support.http_service import LIMITS, MAX_LEN, MODEL, HttpService
from support.running import wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Who is there?"}]
GOOD = {COMPLETIONS: {"prompt": "Who is there?"}, CHAT: {"messages": MESSAGES}}
TOO_LONG = {COMPLETIONS: {"prompt": "x" * MAX_LEN}, CHAT: {"messages": [
    {"role": "user", "content": "x" * MAX_LEN}]}}  # fmt: skip
RAW = (b"", b"{", b"[]", b"null", b'"x"', b"7", b"\xff\xfe", b'{"model": NaN}', b"[" * 50_000,
       b'{"model": "tiny", "prompt": "x"}garbage', b"\0" * 100, b"\x1f\x8b\x08\0gzip")  # fmt: skip
VALUES: tuple[tuple[str, Any], ...] = (
    ("n", -1), ("n", 0), ("n", 1 << 70), ("n", 100_000), ("n", 1.5), ("n", "2"), ("n", True),
    ("max_tokens", -4), ("max_tokens", 0), ("max_tokens", 1 << 70), ("max_tokens", "many"),
    ("temperature", -0.1), ("temperature", "hot"), ("top_p", -1), ("top_p", 2), ("seed", -1),
    ("stop", 3), ("stop", [""]), ("stream", "yes"), ("stop_token_ids", [-1]), ("model", 3),
    ("tools", [{}]), ("logprobs", True),
)  # fmt: skip
WRONG_HTTP = {
    "no HTTP": b"\x16\x03\x01 hello\r\n\r\n",
    "no length that is a number": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    b"Content-Length: many\r\n\r\n",
    "a negative length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    b"Content-Length: 6\r\n\r\n",
    "a chunk of no size": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "a header without an end": b"GET /ready HTTP/1.1\r\nX: " + b"x" * 200_000,
    "no host": b"GET /ready HTTP/1.1\r\n\r\n",
}


@pytest.fixture
def leakless(service: HttpService) -> Iterator[HttpService]:
    """What is open is what was open before."""
    process = psutil.Process()
    before = process.num_fds(), threading.active_count()
    yield service
    service.until_idle()
    wait_until(lambda: service.num_connections() == 0, 10, "connections")
    wait_until(lambda: process.num_fds() <= before[0], 10, "descriptors")
    assert threading.active_count() <= before[1]


def bad_bodies(path: str) -> list[tuple[bytes, int, str | None]]:
    """With the status and the parameter that the answer names; None: any, or none."""
    good = {"model": MODEL, **GOOD[path]}
    found: list[tuple[bytes, int, str | None]] = [(raw, 400, None) for raw in RAW]
    for name, value in VALUES:
        found.append((json.dumps({**good, name: value}).encode(), 400, name))
    (field,) = GOOD[path]
    found += [
        (json.dumps({"model": MODEL}).encode(), 400, field),
        (json.dumps({"model": MODEL, field: 7}).encode(), 400, field),
        (json.dumps({"model": MODEL, field: []}).encode(), 400, field),
        (json.dumps({"model": MODEL, **TOO_LONG[path]}).encode(), 400, field),
        (json.dumps(GOOD[path]).encode(), 400, "model"),
        (json.dumps({**good, "model": "other"}).encode(), 404, "model"),
        (json.dumps({**good, "model": ""}).encode(), 404, "model"),
    ]
    return found


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_bad_body_is_refused_by_name_and_the_connection_goes_on(
    leakless: HttpService, path: str
) -> None:
    """One connection for all of them, with good requests between."""
    connection = http.client.HTTPConnection("127.0.0.1", leakless.port, timeout=20)
    good = json.dumps({"model": MODEL, "max_tokens": 1, **GOOD[path]}).encode()
    try:
        for at, (body, status, parameter) in enumerate(bad_bodies(path)):
            connection.request("POST", path, body)
            used = connection.sock
            answer = connection.getresponse()
            told = json.loads(answer.read())
            assert answer.status == status, (body[:80], told)
            assert answer.headers["content-type"] == "application/json"
            assert set(told["error"]) == {"message", "type", "param", "code"}
            kind = "not_found_error" if status == 404 else "invalid_request_error"
            assert told["error"]["type"] == kind
            assert len(told["error"]["message"]) < 400
            if parameter is not None:
                assert told["error"]["param"].startswith(parameter), body[:80]
            assert leakless.front.num_in_flight == 0
            if at % 10 == 0:
                connection.request("POST", path, good)
                answer = connection.getresponse()
                assert (answer.status, connection.sock) == (200, used), answer.read()
                answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("name", WRONG_HTTP)
def test_what_is_no_request_is_refused_and_its_connection_closed(
    leakless: HttpService, name: str
) -> None:
    with leakless.socket(WRONG_HTTP[name]) as one:
        data = b""
        while part := received(one):
            data += part
        assert data.startswith((b"HTTP/1.1 4",)), data[:200]


def received(one: socket.socket) -> bytes:
    """b'' at the end: also where the server gave up what it had not read."""
    try:
        return one.recv(100_000)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_client_that_ends_its_half_within_its_body_is_forgotten(
    leakless: HttpService, share: float
) -> None:
    """It can say no more, so nothing is waited for: no deadline has to pass."""
    ask = leakless.post_bytes(prompt="x" * 200)
    head = ask.index(b"\r\n\r\n") + 4
    with leakless.socket(ask[: head + int(share * (len(ask) - head))]) as one:
        one.shutdown(socket.SHUT_WR)
        began_s = time.monotonic()
        while received(one):
            pass
        assert time.monotonic() - began_s < 5
    assert leakless.front.num_in_flight == 0


@pytest.mark.slow  # a second or two of drops
def test_a_client_that_is_slow_but_says_something_is_served_within_its_deadline(
    leakless: HttpService,
) -> None:
    """A byte at a time, faster than `request_body_timeout_s` allows; and one that never gets there
    is told so, though it always says something."""
    quick = leakless.post_bytes(prompt="Who?", max_tokens=2)
    with leakless.socket(quick[:-20]) as one:
        for byte in quick[-20:]:
            time.sleep(0.01)
            one.sendall(bytes([byte]))
        assert one.recv(1000).startswith(b"HTTP/1.1 200")
    late = leakless.post_bytes(prompt="x" * 500)
    with leakless.socket(late[:-400]) as one:
        began_s = time.monotonic()
        data = drip(one, late[-400:], 0.05)
        assert data.startswith(b"HTTP/1.1 408"), data[:100]
        assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["type"]
        assert time.monotonic() - began_s < 10 * LIMITS.request_body_timeout_s


def drip(one: socket.socket, data: bytes, pause_s: float) -> bytes:
    """What came back before all of `data` was sent, a byte at a time."""
    one.settimeout(pause_s)
    for byte in data:
        one.sendall(bytes([byte]))
        try:
            begun = one.recv(10_000)
        except TimeoutError:
            continue
        return whole_answer(one, begun)
    raise AssertionError("nothing came back")


def whole_answer(one: socket.socket, data: bytes) -> bytes:
    """`data` with what is missing of the answer that it begins: head and body may come apart."""
    one.settimeout(10)
    while True:
        head, end_of_head, body = data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *([0-9]+)", head, re.IGNORECASE)
        if end_of_head and length is not None and len(body) >= int(length[1]):
            return data
        part = one.recv(10_000)
        assert part, data
        data += part


def test_many_bad_clients_at_once_cost_the_good_ones_nothing(leakless: HttpService) -> None:
    """Some half, some wrong, some that leave: all of them open at the same time."""
    chance = random.Random(6)
    with ExitStack() as undo:
        for at in range(60):
            ask = leakless.post_bytes(prompt="x" * 50, max_tokens=-1)
            kind = (ask, ask[: chance.randrange(len(ask))], *WRONG_HTTP.values())[at % 9]
            undo.enter_context(leakless.socket(kind[:50_000]))
        began_s = time.monotonic()
        status, body = leakless.ask(model=MODEL, prompt="Who is there?", max_tokens=3)
        assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
        assert time.monotonic() - began_s < 5
