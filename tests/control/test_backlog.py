"""A peer that reads nothing, or says too much: what waits for it and from it is bounded, and nobody
else notices."""

import time

import pytest
import zmq

from kvxfer.control.channel import MAX_QUEUED, MAX_UNREAD, Channel
from kvxfer.control.messages import Goodbye, Heartbeat
from kvxfer.control.wire import MAX_MESSAGE_BYTES, encode
from kvxfer.errors import ControlError

KIB_32 = Goodbye("x" * (32 << 10), False)
"""So large that the kernel's buffers hold few."""
MIB, MIB_4 = Goodbye("x" * (1 << 20), False), Goodbye("x" * (4 << 20), False)


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


def flood(address: str, data: bytes, num: int, pause_s: float = 0.5) -> int:
    """How many of `num` messages a server takes that reads none."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.SNDHWM, 1)
    dealer.setsockopt(zmq.SNDTIMEO, int(pause_s * 1000))
    dealer.connect(address)
    sent = 0
    try:
        while sent < num:
            dealer.send(data)
            sent += 1
    except zmq.Again:
        pass
    finally:
        context.destroy(linger=0)
    return sent


def test_what_a_peer_can_have_us_hold_is_bounded_in_bytes():
    server = Channel("server", "tcp://127.0.0.1:0")
    try:
        taken = flood(server.address, encode(MIB), 20 * MAX_UNREAD)
        assert MAX_UNREAD <= taken <= 2 * MAX_UNREAD, "the kernel's buffers hold a few"
    finally:
        server.close()
    assert MAX_UNREAD * MAX_MESSAGE_BYTES <= 256 << 20


def test_one_turn_takes_in_few_bytes_however_many_wait():
    server, client = Channel("server", "tcp://127.0.0.1:0"), Channel("client")
    try:
        key, sent, deadline = client.dial(server.address), 0, time.monotonic() + 5.0
        while sent < MAX_UNREAD:
            assert time.monotonic() < deadline
            try:
                client.send(key, MIB_4)
                sent += 1
            except ControlError:
                time.sleep(0.01)
        turns = []
        while sum(turns) < sent:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            turns.append(len(server.poll(0.05)))
        assert max(turns) <= MAX_MESSAGE_BYTES // (4 << 20) + 1, turns
    finally:
        client.close()
        server.close()
