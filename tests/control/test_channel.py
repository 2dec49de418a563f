"""The control plane's sockets, on loopback."""

import os
import socket
import stat
import tempfile
import time
from pathlib import Path

import pytest
import zmq
from support.fixtures import num_open_files

from kvxfer.control.addresses import LONGEST_PATH_BYTES, check_address
from kvxfer.control.channel import Channel
from kvxfer.control.messages import Goodbye, Heartbeat
from kvxfer.control.router_messages import Cancel, Token
from kvxfer.control.wire import encode
from kvxfer.errors import ControlError, UsageError, WireError

ANY = "tcp://127.0.0.1:0"


@pytest.fixture
def private():
    """A directory that is ours alone, with a short name."""
    with tempfile.TemporaryDirectory(prefix="kvx-") as name:
        yield Path(name)


@pytest.fixture(params=["tcp", "ipc"])
def listen(request, private):
    """An address of either kind that may be bound."""
    return ANY if request.param == "tcp" else f"ipc://{private}/socket"


@pytest.fixture
def make():
    files, made = num_open_files(), []

    def channel(name="a", listen=None):
        made.append(Channel(name, listen))
        return made[-1]

    yield channel
    for one in made:
        one.close()
    deadline = time.monotonic() + 5
    while num_open_files() != files:  # libzmq's reaper thread closes the last descriptors
        assert time.monotonic() < deadline
        time.sleep(0.01)


def poll_until(channel, count, timeout_s=10.0):
    letters, deadline = [], time.monotonic() + timeout_s
    while len(letters) < count:
        assert time.monotonic() < deadline, letters
        letters += channel.poll(0.05)
    return letters


def send_when_connected(channel, peer, message):
    deadline = time.monotonic() + 10
    while True:
        try:
            return channel.send(peer, message)
        except ControlError:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def connected(make, listen=ANY):
    server, client = make("server", listen), make("client.42")
    key = client.dial(server.address)
    send_when_connected(client, key, Heartbeat())
    (letter,) = poll_until(server, 1)
    return server, client, key, letter.peer


def test_messages_go_both_ways_in_order(make, listen):
    server, client, key, peer = connected(make, listen)
    assert peer == f"in:{b'client.42'.hex()}"
    assert key == f"out:{server.address}"
    for index in range(600):  # more than one drain takes
        client.send(key, Token("there", index, 0))
        server.send(peer, Token("back", index, 0))
    there, back = poll_until(server, 600), poll_until(client, 600)
    assert [(x.peer, x.message) for x in there] == [
        (peer, Token("there", index, 0)) for index in range(600)
    ]
    assert [(x.peer, x.message) for x in back] == [
        (key, Token("back", index, 0)) for index in range(600)
    ]


def test_a_port_of_0_becomes_the_bound_one(make):
    first, second = make("a", ANY), make("b", ANY)
    assert first.address != second.address
    assert int(first.address.rsplit(":", 1)[1]) > 0
    assert make("c").address == ""


def test_dialling_twice_is_dialling_once(make, listen):
    server, client, key, _ = connected(make, listen)
    assert client.dial(server.address) == key
    client.send(key, Cancel("once"))
    poll_until(server, 1)
    assert server.poll(0.05) == []


def test_many_dial_one(make):
    server = make("server", ANY)
    clients = [make(f"client-{index}") for index in range(5)]
    for index, client in enumerate(clients):
        send_when_connected(client, client.dial(server.address), Token("r", index, 0))
    letters = poll_until(server, 5)
    assert len({letter.peer for letter in letters}) == 5
    for letter in letters:
        server.send(letter.peer, letter.message)
    for index, client in enumerate(clients):
        assert poll_until(client, 1)[0].message == Token("r", index, 0)


def raw_dealer(address):
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return context, socket


MALFORMED = [
    [b""],
    [b"nonsense"],
    [encode(Heartbeat()), b"more"],
    [b"", encode(Heartbeat())],
    [b"\xc1" * 1000],
]


@pytest.mark.parametrize("frames", MALFORMED)
def test_malformed_frames_are_dropped_and_counted(make, frames):
    server, client, key, _ = connected(make)
    context, stranger = raw_dealer(server.address)
    stranger.send_multipart(frames)
    deadline = time.monotonic() + 10
    while server.num_malformed < 1:
        assert time.monotonic() < deadline
        assert server.poll(0.05) == []
    client.send(key, Cancel("still there"))
    assert poll_until(server, 1)[0].message == Cancel("still there")
    assert server.num_malformed == 1
    context.destroy(linger=0)


def test_a_flood_of_nonsense_does_not_fill_the_log_or_stop_others(make, caplog):
    server, client, key, _ = connected(make)
    context, stranger = raw_dealer(server.address)
    for _ in range(500):
        stranger.send(b"nonsense")
    letters, deadline = [], time.monotonic() + 10
    while server.num_malformed < 500:
        assert time.monotonic() < deadline
        letters += server.poll(0.05)
    client.send(key, Heartbeat())
    poll_until(server, 1)
    assert len(caplog.records) == 9  # the 1st, 2nd, 4th, ... 256th
    context.destroy(linger=0)


def test_a_reply_of_nonsense_is_counted_too(make):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind("tcp://127.0.0.1:*")
    client = make("client")
    key = client.dial(router.getsockopt_string(zmq.LAST_ENDPOINT))
    send_when_connected(client, key, Heartbeat())
    identity, _ = router.recv_multipart()
    router.send_multipart([identity, b"nonsense"])
    deadline = time.monotonic() + 10
    while client.num_malformed < 1:
        assert time.monotonic() < deadline
        client.poll(0.05)
    context.destroy(linger=0)


REFUSED = [
    "tcp://0.0.0.0:5000",
    "tcp://*:5000",
    "tcp://10.0.0.1:5000",
    "tcp://example.org:5000",
    "tcp://127.0.0.1.example.org:5000",
    "tcp://[::]:5000",
    "tcp://127.0.0.1",
    "tcp://127.0.0.1:*",
    "tcp://127.0.0.1:",
    "tcp://127.0.0.1:-1",
    "tcp://eth0;127.0.0.1:5000",
    "ipc:///tmp/kvxfer",  # a directory of everybody's
    "ipc:///nowhere/socket",
    "ipc:///dev/null/socket",
    "ipc://relative",
    "ipc://@abstract",
    "ipc://*",
    "ipc:///proc/",
    "ipc:///a\0b",
    "ipc:///a\nb",
    "ipc:///a\udc80b",
    "ipc:///" + "a" * LONGEST_PATH_BYTES,
    "ipc://",
    "inproc://kvxfer",
    "127.0.0.1:5000",
    "",
]


@pytest.mark.parametrize("address", REFUSED)
def test_what_is_not_loopback_is_refused(make, address):
    with pytest.raises(UsageError, match="listen") as error:
        make("server", address)
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(UsageError, match="address"):
        make("client").dial(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_the_names_of_this_host_are_allowed(host):
    check_address("listen", f"tcp://{host}:5000")


@pytest.mark.parametrize("port", ["65536", "99999999999", "\N{ARABIC-INDIC DIGIT THREE}"])
def test_an_impossible_port_is_one_usage_error(make, port):
    with pytest.raises(UsageError, match="listen"):
        make("server", f"tcp://127.0.0.1:{port}")
    with pytest.raises(UsageError, match="address"):
        make("client").dial(f"tcp://127.0.0.1:{port}")


def test_a_port_in_use_is_one_usage_error(make):
    taken = make("first", ANY).address
    with pytest.raises(UsageError) as error:
        make("second", taken)
    assert str(error.value).startswith(f"listen: '{taken}': cannot bind: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_every_allowed_host_can_be_bound_or_is_refused_in_one_line(make, host):
    """IPv6 may be absent from a machine; a traceback may not."""
    try:
        server = make("server", f"tcp://{host}:0")
    except UsageError as error:
        assert "cannot bind" in str(error)
        return
    client = make("client")
    send_when_connected(client, client.dial(server.address), Heartbeat())
    poll_until(server, 1)


def test_sending_to_nobody_raises_control_error(make):
    server = make("server", ANY)
    client = make("client")
    absent = client.dial("tcp://127.0.0.1:1")
    for channel, peer in [
        (client, absent),
        (client, "out:tcp://127.0.0.1:2"),
        (client, "in:00"),
        (server, "in:" + b"unknown".hex()),
        (server, ""),
        (server, "elsewhere"),
    ]:
        with pytest.raises(ControlError):
            channel.send(peer, Heartbeat())


def test_sending_to_who_has_left_raises_control_error(make, listen):
    server, client, _, peer = connected(make, listen)
    client.close()
    deadline = time.monotonic() + 10
    while True:
        try:
            server.send(peer, Heartbeat())
        except ControlError as error:
            assert "cannot send Heartbeat" in str(error)
            break
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_message_that_nobody_would_take_is_not_sent(make):
    server, client, key, _ = connected(make)
    with pytest.raises(WireError):
        client.send(key, Goodbye("x" * (17 << 20), False))
    client.send(key, Cancel("the connection lives"))
    assert poll_until(server, 1)[0].message == Cancel("the connection lives")


def test_a_dialler_finds_a_listener_that_comes_back(make, listen):
    server, client, key, _ = connected(make, listen)
    address = server.address
    server.close()
    again = make("again", address)
    send_when_connected(client, key, Cancel("hello again"))
    deadline = time.monotonic() + 10
    found = []
    while not found:
        assert time.monotonic() < deadline
        found = again.poll(0.05)
        try:
            client.send(key, Cancel("hello again"))
        except ControlError:
            continue
    assert found[0].message == Cancel("hello again")


def test_a_watched_descriptor_wakes_poll(make):
    server = make("server", ANY)
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        server.watch(fd)
        assert server.poll(0.0) == []
        os.eventfd_write(fd, 1)
        started = time.monotonic()
        assert server.poll(20.0) == []
        assert time.monotonic() - started < 10.0
    finally:
        os.close(fd)


def test_poll_waits_as_long_as_it_was_told(make):
    server = make("server", ANY)
    started = time.monotonic()
    assert server.poll(0.1) == []
    assert 0.09 <= time.monotonic() - started < 5.0


def test_close_is_idempotent_and_sends_last_words(make, listen):
    server, client, key, _ = connected(make, listen)
    client.send(key, Goodbye("last words", False))
    client.close()
    client.close()
    assert poll_until(server, 1)[0].message == Goodbye("last words", False)
    with pytest.raises(ControlError):
        client.send(key, Heartbeat())
    server.close()
    server.close()


def test_close_does_not_wait_for_a_peer_that_is_not_there(make):
    client = make("client")
    client.dial("tcp://127.0.0.1:1")
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < 2.0


def test_a_socket_file_is_ours_alone_and_goes_with_the_channel(make, private):
    path = private / "socket"
    server = make("server", f"ipc://{path}")
    assert server.address == f"ipc://{path}"
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    server.close()
    assert list(private.iterdir()) == []


def test_the_longest_path_is_taken_and_one_byte_more_is_not(make, private):
    fitting = f"{private}/" + "s" * (LONGEST_PATH_BYTES - len(str(private)) - 1)
    server, client = make("server", f"ipc://{fitting}"), make("client")
    send_when_connected(client, client.dial(server.address), Heartbeat())
    poll_until(server, 1)
    with pytest.raises(UsageError, match=f"{LONGEST_PATH_BYTES + 1} bytes"):
        make("second", f"ipc://{fitting}s")


@pytest.mark.parametrize("mode", [0o750, 0o707, 0o755, 0o1777])
def test_a_directory_that_others_may_enter_is_refused(make, private, mode):
    private.chmod(mode)
    for field, use in (("listen", lambda a: make("a", a)), ("address", make("b").dial)):
        with pytest.raises(UsageError, match=rf"{field}.*must be yours alone.*{mode:04o}"):
            use(f"ipc://{private}/socket")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(make, private):
    os.chown(private, 4242, 4242)
    with pytest.raises(UsageError, match=r"listen.*user 4242"):
        make("server", f"ipc://{private}/socket")


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_no_socket_is_not_taken_away(make, private, kind):
    path, other = private / "socket", private / "other"
    other.write_text("precious")
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(other)
    with pytest.raises(UsageError, match=r"listen.*no socket is in the way"):
        make("server", f"ipc://{path}")
    assert path.is_dir() or path.read_text() == "precious"


def test_a_socket_that_somebody_listens_on_is_not_taken_away(make, private):
    server, client, key, _ = connected(make, f"ipc://{private}/socket")
    with pytest.raises(UsageError, match=r"listen.*in use"):
        make("second", server.address)
    client.send(key, Cancel("still there"))
    assert [one.message for one in poll_until(server, 1)] == [Cancel("still there")]


def test_a_socket_that_a_killed_process_left_behind_is_no_obstacle(make, private):
    path = private / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    connected(make, f"ipc://{path}")


def test_closing_leaves_the_file_of_whoever_came_after(make, private):
    path = private / "socket"
    first = make("first", f"ipc://{path}")
    path.unlink()
    second = make("second", f"ipc://{path}")
    first.close()
    client = make("client")
    send_when_connected(client, client.dial(second.address), Heartbeat())
    poll_until(second, 1)


def test_a_path_that_is_not_there_yet_is_dialled_until_it_is(make, private):
    client = make("client")
    key = client.dial(f"ipc://{private}/socket")
    with pytest.raises(ControlError):
        client.send(key, Heartbeat())
    server = make("server", f"ipc://{private}/socket")
    send_when_connected(client, key, Heartbeat())
    poll_until(server, 1)
