"""Clients of the HTTP front that leave, stall, or never say what they want. After each test nothing
is under way anywhere, and no connection is left."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest
from support.http_service import HttpService
from support.running import wait_until

PROMPT = "Who is there?"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_a_client_that_leaves_frees_everything(
    service: HttpService, streams: bool, how: str
) -> None:
    ask = service.post_bytes(prompt=PROMPT, max_tokens=900, n=3, stream=streams)
    with service.socket(ask) as one:
        wait_until(lambda: service.front.num_in_flight == 3, 5, "three in flight")
        if streams:
            assert one.recv(10)
        if how == "reset":
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if how == "half":
            one.shutdown(socket.SHUT_WR)
            service.until_idle()
    began = time.monotonic()
    service.until_idle()
    assert time.monotonic() - began < 2


def test_a_client_that_leaves_while_prefill_works(service: HttpService) -> None:
    service.prefill.runner.hold()
    with service.socket(service.post_bytes(prompt="x" * 200, max_tokens=9)):
        wait_until(lambda: service.front.num_in_flight == 1, 5, "one in flight")
        wait_until(lambda: not service.within(service.prefill.is_idle), 5, "prefill has it")
    wait_until(lambda: service.front.num_in_flight == 0, 5, "nobody waits")
    service.release()
    service.until_idle()


@pytest.mark.slow  # waits for deadlines
def test_a_client_that_reads_nothing_is_given_up(service: HttpService) -> None:
    """Its socket takes what the kernel takes; what is written is bounded, and it is not kept."""
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        one.settimeout(20)
        one.connect(("127.0.0.1", service.port))
        ask = service.post_bytes(
            prompt="x" * 900, max_tokens=1, echo=True, return_token_ids=True, n=6
        )
        with contextlib.suppress(ConnectionError):
            one.sendall(ask * 30)  # 700 KB of answers: more than all buffers on the way hold
        wait_until(lambda: service.num_connections() == 1, 5, "the connection")
        wait_until(lambda: service.num_connections() == 0, 15, "the connection to be ended")


@pytest.mark.slow  # waits for deadlines
def test_a_client_that_says_nothing_or_half_is_given_up(service: HttpService) -> None:
    ask = service.post_bytes(prompt=PROMPT)
    with service.socket(), service.socket(ask[:20]), service.socket(ask[:-5]) as late:
        assert late.recv(1000).startswith(b"HTTP/1.1 408")
        wait_until(lambda: service.num_connections() == 0, 10, "connections to be ended")


def test_what_is_no_http_is_refused(service: HttpService) -> None:
    with service.socket(b"\x16\x03\x01 hello\r\n\r\n") as one:
        assert one.recv(1000).startswith(b"HTTP/1.1 400")


def test_at_the_end_nobody_is_left_waiting() -> None:
    with HttpService() as service:
        service.hold()
        ask = service.post_bytes(prompt=PROMPT, max_tokens=500, stream=True)
        with service.socket(ask) as one, service.socket(service.post_bytes(prompt=PROMPT)) as two:
            wait_until(lambda: service.front.num_in_flight == 2, 5, "two in flight")
            assert one.recv(20)
            began = time.monotonic()
            service.server.stop()
            data = b""
            while part := one.recv(100_000):
                data += part
            assert b"shutting down" in data
            assert b"[DONE]" not in data
            assert two.recv(1000).startswith(b"HTTP/1.1 503")
            service._threads[1].join(5)
            assert time.monotonic() - began < 2
        service.release()
        wait_until(lambda: service.within(service.cluster.idle), 10, "the workers")
