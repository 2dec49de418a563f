"""A peer that reads nothing: what waits for it is bounded, and nobody else notices."""

import time

import pytest

from kvxfer.control.channel import MAX_QUEUED, Channel
from kvxfer.control.messages import Goodbye, Heartbeat
from kvxfer.errors import ControlError

KIB_32 = Goodbye("x" * (32 << 10))
"""So large that the kernel's buffers hold few."""


def hear(channel, count=1, timeout_s=5.0):
    letters, deadline = [], time.monotonic() + timeout_s
    while len(letters) < count and time.monotonic() < deadline:
        letters += channel.poll(0.05)
    return letters


def test_what_waits_for_a_peer_that_does_not_read_is_bounded():
    with_deaf, with_other = Channel("deaf"), Channel("other")
    server = Channel("server", "tcp://127.0.0.1:0")
    try:
        for channel in (with_deaf, with_other):
            key = channel.dial(server.address)
            deadline = time.monotonic() + 5.0
            while True:
                try:
                    channel.send(key, Heartbeat())
                    break
                except ControlError:
                    assert time.monotonic() < deadline
        peers = {letter.peer for letter in hear(server, 2)}
        deaf, other = f"in:{b'deaf'.hex()}", f"in:{b'other'.hex()}"
        assert peers == {deaf, other}
        sent, start = 0, time.monotonic()
        with pytest.raises(ControlError, match="cannot send Goodbye"):
            while sent < 20 * MAX_QUEUED:
                server.send(deaf, KIB_32)
                sent += 1
        assert MAX_QUEUED <= sent < 10 * MAX_QUEUED
        assert time.monotonic() - start < 5.0, "it was refused, not waited for"
        server.send(other, Heartbeat())
        assert [type(letter.message) for letter in hear(with_other)] == [Heartbeat]
    finally:
        for channel in (with_deaf, with_other, server):
            channel.close()
