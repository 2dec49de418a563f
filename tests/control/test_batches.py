"""Several messages in one of ZeroMQ's, between channels and as a stranger may make them."""

import time
from contextlib import contextmanager

import pytest
import zmq

from kvxfer.control.channel import MAX_DRAINED, Channel
from kvxfer.control.messages import WIRE_VERSION, Heartbeat, Hello, Reject
from kvxfer.control.router_messages import Cancel, Token
from kvxfer.control.wire import MAX_BATCH, decode_frame, encode, join
from kvxfer.errors import ControlError

ANY = "tcp://127.0.0.1:0"


@pytest.fixture
def make():
    made = []

    def channel(name, listen=None):
        made.append(Channel(name, listen))
        return made[-1]

    yield channel
    for one in made:
        one.close()


def poll_until(channel, count):
    letters, deadline = [], time.monotonic() + 10
    while len(letters) < count:
        assert time.monotonic() < deadline, letters
        letters += channel.poll(0.05)
    return letters


@contextmanager
def gathering(channel):
    """As a turn of a control loop."""
    channel.gather()
    yield
    channel.let_go()


def connect(server, client):
    key = client.dial(server.address)
    deadline = time.monotonic() + 10
    while True:
        try:
            client.send(key, Heartbeat())
            break
        except ControlError:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    (letter,) = poll_until(server, 1)
    return key, letter.peer


@pytest.fixture
def raw():
    """Connects a socket of ZeroMQ's own."""
    context, made = zmq.Context(), []

    def dial(server):
        socket = context.socket(zmq.DEALER)
        made.append(socket)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(server.address)
        socket.send(encode(Heartbeat()))
        (letter,) = poll_until(server, 1)
        return socket, letter.peer

    yield dial
    for socket in made:
        socket.close(linger=0)
    context.term()


def test_what_is_gathered_arrives_whole_and_in_order(make):
    server, clients = make("server", ANY), [make("a"), make("b")]
    pairs = [connect(server, client) for client in clients]
    count = 2 * MAX_BATCH + 3
    with gathering(server):
        for index in range(count):
            for which, (_, peer) in enumerate(pairs):
                if index % 5 or which:  # rows for one, then turns
                    server.send(peer, Token("r", index, which))
    for which, client in enumerate(clients):
        told = [index for index in range(count) if index % 5 or which]
        found = poll_until(client, len(told))
        assert [one.message for one in found] == [Token("r", index, which) for index in told]
    with gathering(clients[0]):
        for index in range(count):
            clients[0].send(pairs[0][0], Token("r", index, 0))
        time.sleep(0.02)
        early = len(server.poll(0.0))
        assert early <= 2 * MAX_BATCH  # the last batch is not over
    found = poll_until(server, count - early)
    assert [one.message.index for one in found] == list(range(early, count))


def test_a_turns_messages_for_one_peer_are_one_frame(make, raw):
    server = make("server", ANY)
    socket, peer = raw(server)
    with gathering(server):
        for index in range(3):
            server.send(peer, Token("r", index, 0))
        assert not socket.poll(50)
    (frame,) = socket.recv_multipart()
    assert decode_frame(frame) == [Token("r", i, 0) for i in range(3)]
    server.send(peer, Cancel("alone"))
    assert socket.recv_multipart() == [encode(Cancel("alone"))]


@pytest.mark.parametrize("message", [Hello(WIRE_VERSION, None), Reject("a", "b", "c")])
def test_what_all_versions_understand_is_in_no_batch(make, raw, message):
    server = make("server", ANY)
    socket, peer = raw(server)
    with gathering(server):
        server.send(peer, Heartbeat())
        server.send(peer, message)
        server.send(peer, Heartbeat())
    got = [socket.recv_multipart() for _ in range(3)]
    assert got == [[encode(Heartbeat())], [encode(message)], [encode(Heartbeat())]]


def test_sending_to_nobody_is_told_at_once_and_spoils_no_batch(make):
    server, client = make("server", ANY), make("a")
    _, peer = connect(server, client)
    absent = client.dial("tcp://127.0.0.1:1")
    with gathering(server), gathering(client):
        server.send(peer, Token("r", 0, 0))
        with pytest.raises(ControlError, match="cannot send Heartbeat to in:"):
            server.send(f"in:{b'nobody'.hex()}", Heartbeat())
        with pytest.raises(ControlError, match="cannot send Heartbeat to out:"):
            client.send(absent, Heartbeat())
        server.send(peer, Token("r", 1, 0))
    assert [one.message.index for one in poll_until(client, 2)] == [0, 1]


ONE = encode(Cancel("r"))
FULL = join([ONE] * MAX_BATCH)
MALFORMED = [
    [ONE, ONE],
    [join([ONE, ONE]), b""],
    [b"\xdc\x00\x00"],
    [b"\xdc\x00\x01" + ONE],
    [b"\x92" + ONE + ONE],
    [join([ONE, ONE])[:-1]],
    [join([ONE, ONE]) + b"\x00"],
    [join([ONE, b"\x05"])],
    [join([ONE, join([ONE, ONE])])],
    [join([ONE] * (MAX_BATCH + 1))],
    [b"\xdc\xff\xff" + ONE],
    [b"\xdd\xff\xff\xff\xff" + ONE],
]


@pytest.mark.parametrize("frames", MALFORMED)
def test_of_what_is_no_batch_nothing_is_taken(make, raw, frames):
    server = make("server", ANY)
    socket, _ = raw(server)
    socket.send_multipart(frames)
    socket.send(FULL)
    found = poll_until(server, MAX_BATCH)
    assert [one.message for one in found] == [Cancel("r")] * MAX_BATCH
    assert server.num_malformed == 1


@pytest.mark.parametrize("frame", [FULL, b"nonsense"])
def test_a_busy_peer_does_not_keep_the_loop(make, raw, frame):
    server = make("server", ANY)
    socket, _ = raw(server)
    for _ in range(3 * MAX_DRAINED):
        socket.send(frame)
    time.sleep(0.3)
    assert 0 < len(server.poll(0.05)) + server.num_malformed <= MAX_DRAINED
