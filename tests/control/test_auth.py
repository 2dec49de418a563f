"""Keys: who comes in, who does not, what is said of bad files. On loopback, over real ZeroMQ."""

import contextlib
import os
import re
import socket
import stat
import tempfile
import time

import pytest
import zmq
from support.fixtures import num_open_files
from support.keys import KeyRing

from kvxfer.control import auth
from kvxfer.control.addresses import check_address, ip_for_others
from kvxfer.control.auth import REFRESH_S, Keys, make_key_pair
from kvxfer.control.channel import Channel, check_dial
from kvxfer.control.messages import Heartbeat
from kvxfer.control.router_messages import Cancel
from kvxfer.control.wire import encode
from kvxfer.errors import ControlError, UsageError

ANY = "tcp://127.0.0.1:0"
SECRET = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


@pytest.fixture
def ring(tmp_path):
    return KeyRing(tmp_path)


@pytest.fixture
def make():
    files, made = num_open_files(), []

    def channel(name="a", listen=None, keys=None, **more):
        made.append(Channel(name, listen, keys, **more))
        return made[-1]

    yield channel
    for one in made:
        one.close()
    deadline = time.monotonic() + 5
    while num_open_files() != files:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def stranger(kind=zmq.DEALER):
    """A socket of a program that is not ours."""
    with zmq.Context() as context, context.socket(kind) as one:
        one.setsockopt(zmq.LINGER, 0)
        one.setsockopt(zmq.RECONNECT_IVL, 20)
        yield one


def turn(*channels, seconds=0.2):
    letters, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        for channel in channels:
            letters += channel.poll(0.005)
    return letters


def exchange(server, client, key, text, timeout_s=10.0):
    """`client` sends, `server` gets it; both are turned meanwhile."""
    deadline, sent = time.monotonic() + timeout_s, False
    while True:
        if not sent:
            with contextlib.suppress(ControlError):
                client.send(key, Cancel(text))
                sent = True
        for letter in server.poll(0.005):
            if letter.message == Cancel(text):
                return letter
        client.poll(0)
        assert time.monotonic() < deadline


def plain(address):
    return address.rpartition("#")[0]


# --- who comes in ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_a_pair_with_keys_talks_both_ways(make, ring, kind):
    with tempfile.TemporaryDirectory(prefix="kvx-") as private:
        listen = ANY if kind == "tcp" else f"ipc://{private}/socket"
        server = make("server", listen, ring.keys("server"))
        assert server.address.endswith("#server")
        client = make("client", keys=ring.keys("client"))
        server._keys._next_refresh_s = 0.0  # `client` was made after the server looked
        letter = exchange(server, client, client.dial(server.address), "there")
        server.send(letter.peer, Cancel("back"))
        assert [one.message for one in turn(client)] == [Cancel("back")]
        assert server.counts() == dict.fromkeys(server.counts(), 0)
        server.close()


def test_one_key_for_all_needs_no_name(make, ring):
    """The simplest set-up: everybody has the same pair."""
    keys = ring.keys("cluster")
    server, client = make("server", ANY, keys), make("client", keys=keys)
    exchange(server, client, client.dial(plain(server.address)), "there")


def client_without_key(one, ring, server_public):
    pass


def client_with_plain_password(one, ring, server_public):
    one.setsockopt(zmq.PLAIN_USERNAME, b"admin")
    one.setsockopt(zmq.PLAIN_PASSWORD, b"admin")


def client_with_foreign_key(one, ring, server_public):
    one.curve_publickey, one.curve_secretkey = zmq.curve_keypair()
    one.curve_serverkey = server_public


def client_with_anothers_public_key(one, ring, server_public):
    """What somebody has who read the directory of public keys."""
    one.curve_publickey = ring.public("friend").read_bytes().split()[1]
    one.curve_secretkey = zmq.curve_keypair()[1]
    one.curve_serverkey = server_public


def client_with_wrong_server_key(one, ring, server_public):
    words = ring._root.joinpath("of-friend", "friend.key").read_bytes().split()
    one.curve_secretkey, one.curve_publickey = words[1], zmq.curve_public(words[1])
    one.curve_serverkey = zmq.curve_keypair()[0]


@pytest.mark.parametrize(
    "prepare",
    [
        client_without_key,
        client_with_plain_password,
        client_with_foreign_key,
        client_with_anothers_public_key,
        client_with_wrong_server_key,
    ],
)
def test_no_byte_of_a_client_without_the_right_key_is_delivered(make, ring, prepare):
    ring.make("friend")
    server = make("server", ANY, ring.keys("server"))
    with stranger() as one:
        prepare(one, ring, ring.public("server").read_bytes().split()[1])
        one.connect(plain(server.address))
        for _ in range(20):
            one.send(b"nonsense")
            one.send(encode(Heartbeat()))
        assert turn(server) == []
    counts = server.counts()
    assert counts["malformed_messages"] == 0  # not even looked at
    assert (counts["refused_connections"] > 0) == (prepare is client_with_foreign_key)
    client = make("client", keys=Keys.load(ring._root / "of-friend" / "friend.key", ring.allowed))
    exchange(server, client, client.dial(server.address), "goes on")


BODY = encode(Heartbeat())
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
FRAME = bytes([0, len(BODY)]) + BODY
RAW = {
    "ZMTP 1.0": b"\x01\x00" + (bytes([len(BODY) + 1, 0]) + BODY) * 9,
    "ZMTP 2.0": SIGNATURE + b"\x01\x05\x00\x00" + FRAME * 9,
    "NULL": SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32) + FRAME * 9,
    "CURVE": SIGNATURE + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32) + FRAME * 9,
    "HTTP": b"POST / HTTP/1.1\r\nContent-Length: 99\r\n\r\n" + FRAME * 9,
}


@pytest.mark.parametrize("kind", RAW)
@pytest.mark.parametrize("has_keys", [False, True])
def test_raw_bytes_get_nowhere(make, ring, kind, has_keys):
    """Not without keys either: ZMTP 1.0 has no handshake, so that a browser could be made to say
    it, and libzmq would deliver it but for the ZAP domain."""
    server = make("server", ANY, ring.keys("server") if has_keys else None)
    port = int(server.address.partition("#")[0].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(RAW[kind])
        assert turn(server) == []
    assert turn(server, seconds=0.05) == []
    assert server.counts() == dict.fromkeys(server.counts(), 0)


@pytest.mark.parametrize("kind", ["ZMTP 1.0", "ZMTP 2.0"])
def test_those_raw_bytes_are_a_message_where_nobody_minds(kind):
    """So the test above can fail."""
    with stranger(zmq.ROUTER) as server:
        port = server.bind_to_random_port("tcp://127.0.0.1")
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(RAW[kind])
            assert server.poll(5000)
            assert server.recv_multipart()[1] == BODY


def test_connections_that_say_nothing_are_closed_and_hold_up_nobody(make, ring, monkeypatch):
    monkeypatch.setattr(auth, "HANDSHAKE_MS", 400)
    server = make("server", ANY, ring.keys("server"))
    client = make("client", keys=ring.keys("client"))
    server._keys._next_refresh_s = 0.0
    port, before = int(plain(server.address).rpartition(":")[2]), num_open_files()
    with contextlib.ExitStack() as held:
        for _ in range(100):
            held.enter_context(socket.create_connection(("127.0.0.1", port)))
        exchange(server, client, client.dial(server.address), "goes on")
        deadline = time.monotonic() + 10
        while num_open_files() > before + 110:  # theirs, and the client's
            assert time.monotonic() < deadline
            turn(server, seconds=0.05)


def test_a_server_without_the_pinned_key_hears_nothing(make, ring):
    """Whoever listens at a worker's address without its key cannot pose as it."""
    ring.make("server")
    client = make("client", keys=ring.keys("client"))
    for secret in (None, zmq.curve_keypair()[1]):
        with stranger(zmq.ROUTER) as posing:
            if secret:
                posing.curve_server, posing.curve_secretkey = True, secret
            port = posing.bind_to_random_port("tcp://127.0.0.1")
            key = client.dial(f"tcp://127.0.0.1:{port}#server")
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                with pytest.raises(ControlError):
                    client.send(key, Heartbeat())
                client.poll(0.01)
            assert not posing.poll(0)


def test_without_a_door_nobody_comes_in(ring):
    """ZAP_ENFORCE_DOMAIN: libzmq's own default would let everybody in."""
    keys = ring.keys("server")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server, stranger() as one:
        server.setsockopt(zmq.LINGER, 0)
        keys.guard(server)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        keys.introduce(one, ring.public("server").read_bytes().split()[1])
        one.connect(f"tcp://127.0.0.1:{port}")
        one.send(b"let me in")
        assert not server.poll(300)


# --- keys that go and come ------------------------------------------------------------------------


def test_a_revoked_key_is_cut_off_in_its_session_and_at_the_door(make, ring, caplog):
    server = make("server", ANY, ring.keys("server"))
    keys = {name: ring.keys(name) for name in ("good", "bad")}
    time.sleep(REFRESH_S)
    good, bad = (make(name, keys=keys[name]) for name in keys)
    for client in (good, bad):
        exchange(server, client, client.dial(server.address), "before")
    ring.revoke("bad")
    deadline = time.monotonic() + REFRESH_S + 5
    while server.num_revoked == 0:
        assert time.monotonic() < deadline
        with contextlib.suppress(ControlError):
            bad._dealers[f"out:{server.address}"].send(encode(Cancel("after")), zmq.NOBLOCK)
        server.poll(0.05)
    again = make("again", keys=keys["bad"])
    again.dial(server.address)
    turn(server, again)
    assert server.counts()["refused_connections"] > 0
    exchange(server, good, f"out:{server.address}", "goes on")
    assert "bad" in caplog.text
    assert not SECRET.search(caplog.text) or secrets_in(caplog.text, ring) == []


def secrets_in(text, ring):
    held = [path.read_text().split()[1] for path in ring._root.glob("of-*/*.key")]
    assert held
    return [secret for secret in held if secret in text]


def test_a_server_whose_key_was_revoked_is_sent_nothing_more(make, ring):
    server = make("server", ANY, ring.keys("server"))
    client = make("client", keys=ring.keys("client"))
    server._keys._next_refresh_s = 0.0
    key = client.dial(server.address)
    letter = exchange(server, client, key, "before")
    ring.revoke("server")
    client._keys._next_refresh_s = 0.0
    server.send(letter.peer, Cancel("late"))
    assert turn(client) == []
    assert client.num_revoked == 1
    with pytest.raises(ControlError, match="revoked"):
        client.send(key, Heartbeat())


def test_a_key_that_is_added_is_let_in_without_a_restart(make, ring):
    server = make("server", ANY, ring.keys("server"))
    client = make("client", keys=ring.keys("late"))
    exchange(server, client, client.dial(server.address), "in")


@pytest.mark.parametrize("harm", ["gone", "open to others", "a bad file"])
def test_a_directory_that_goes_bad_lets_nobody_in_and_heals(make, ring, harm, caplog):
    keys = ring.keys("server")
    good = dict(keys._peers)
    bad = ring.allowed / "x.pub"
    if harm == "gone":
        ring.allowed.rename(ring._root / "away")
    elif harm == "open to others":
        ring.allowed.chmod(0o777)
    else:
        bad.write_text("nonsense")
    for _ in range(3):
        keys._next_refresh_s = 0.0
        keys.refresh()
    assert keys._peers == {}
    assert len(caplog.records) == 1
    if harm == "gone":
        (ring._root / "away").rename(ring.allowed)
    ring.allowed.chmod(0o700)
    bad.unlink(missing_ok=True)
    keys._next_refresh_s = 0.0
    keys.refresh()
    assert keys._peers == good


# --- files ----------------------------------------------------------------------------------------


def test_keygen_writes_two_files_of_mode_0600_and_never_over_one(tmp_path):
    old = os.umask(0)
    try:
        secret, public = make_key_pair(tmp_path / "keys", "worker-0")
    finally:
        os.umask(old)
    assert [path.name for path in (secret, public)] == ["worker-0.key", "worker-0.pub"]
    for path in (secret, public):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700
    before = secret.read_text(), public.read_text()
    with pytest.raises(UsageError, match=r"worker-0\.key.*exists"):
        make_key_pair(tmp_path / "keys", "worker-0")
    secret.unlink()
    with pytest.raises(UsageError, match=r"worker-0\.pub.*exists"):
        make_key_pair(tmp_path / "keys", "worker-0")
    assert not secret.exists()
    assert public.read_text() == before[1]
    assert zmq.curve_public(before[0].split()[1].encode()) == before[1].split()[1].encode()


@pytest.mark.parametrize("name", ["", "..", "a/b", "-a", "a b", "a\n", "a#b", "x" * 65])
def test_keygen_refuses_names_that_are_none(tmp_path, name):
    with pytest.raises(UsageError, match="name"):
        make_key_pair(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def bad_secret(text, mode=0o600):
    def harm(ring, secret):
        secret.write_bytes(text)
        secret.chmod(mode)

    return harm


GOOD = b"a" * 40
BAD_SECRETS = {
    "missing": (lambda ring, secret: secret.unlink(), "No such file"),
    "directory": (lambda ring, secret: (secret.unlink(), secret.mkdir()), "directory"),
    "readable": (lambda ring, secret: secret.chmod(0o640), "0640"),
    "empty": (bad_secret(b""), "kvxfer keygen"),
    "half": (bad_secret(b"kvxfer-secret-key " + GOOD[:39]), "kvxfer keygen"),
    "not z85": (bad_secret(b"kvxfer-secret-key " + b"\xff" * 40), "kvxfer keygen"),
    "too large": (bad_secret(b"kvxfer-secret-key " + b"#" * 40), "kvxfer keygen"),
    "another's": (bad_secret(b"public-key = " + GOOD), "kvxfer keygen"),
    "public": (bad_secret(b"kvxfer-public-key " + GOOD), "public key"),
    "endless": (bad_secret(b"kvxfer-secret-key" + b" " * 5000 + GOOD), "kvxfer keygen"),
}
BAD_DIRECTORIES = {
    "no directory": (lambda ring: ring.allowed.rename(ring._root / "x"), "No such file"),
    "nobody": (lambda ring: [path.unlink() for path in ring.allowed.iterdir()], "nobody"),
    "writable": (lambda ring: ring.allowed.chmod(0o720), "0720"),
    "writable key": (lambda ring: (ring.allowed / "a.pub").chmod(0o606), "0606"),
    "nonsense": (lambda ring: (ring.allowed / "b.pub").write_text("x y"), "b.pub"),
    "twice": (lambda ring: os.link(ring.allowed / "a.pub", ring.allowed / "b.pub"), "a.pub"),
    "bad name": (lambda ring: os.link(ring.allowed / "a.pub", ring.allowed / "b c.pub"), "b c.pub"),
    "a secret": (
        lambda ring: (ring.allowed / "b.pub").write_bytes(b"kvxfer-secret-key " + GOOD),
        "give it to nobody",
    ),
}


@pytest.mark.parametrize("harm", BAD_SECRETS)
def test_a_bad_secret_key_is_one_line_that_does_not_tell_it(ring, harm):
    secret = ring.make("a")
    act, mentioned = BAD_SECRETS[harm]
    act(ring, secret)
    with pytest.raises(UsageError, match="key_file") as error:
        Keys.load(secret, ring.allowed)
    assert mentioned in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert GOOD.decode() not in str(error.value)


@pytest.mark.parametrize("harm", BAD_DIRECTORIES)
def test_a_bad_directory_of_public_keys_is_one_line(ring, harm):
    secret = ring.make("a")
    act, mentioned = BAD_DIRECTORIES[harm]
    act(ring)
    with pytest.raises(UsageError, match="peer_keys") as error:
        Keys.load(secret, ring.allowed)
    assert mentioned in str(error.value)
    assert GOOD.decode() not in str(error.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_another_user_is_refused(ring):
    secret = ring.make("a")
    os.chown(secret, 4242, 4242)
    with pytest.raises(UsageError, match=r"key_file.*user 4242"):
        Keys.load(secret, ring.allowed)


@pytest.mark.parametrize("mode, is_good", [(0o440, True), (0o640, True), (0o660, False)])
@pytest.mark.skipif(os.geteuid() != 0, reason="the file has to be root's")
def test_a_key_of_roots_may_be_read_by_its_group_alone(ring, monkeypatch, mode, is_good):
    """As Kubernetes gives it to a container of user 10001."""
    secret = ring.make("a")
    secret.chmod(mode)
    with pytest.raises(UsageError, match=r"key_file.*must be 0600"):
        Keys.load(secret, ring.allowed)  # our own file is ours alone
    monkeypatch.setattr("kvxfer.control.auth.os.geteuid", lambda: 10001)
    if is_good:
        assert Keys.load(secret, ring.allowed) is not None
    else:
        with pytest.raises(UsageError, match=r"key_file.*must be 0600"):
            Keys.load(secret, ring.allowed)
    secret.chmod(0o444)
    with pytest.raises(UsageError, match=r"key_file.*must be 0600"):
        Keys.load(secret, ring.allowed)


def test_one_option_without_the_other_is_refused(ring):
    assert Keys.load(None, None) is None
    secret = ring.make("a")
    with pytest.raises(UsageError, match=r"key_file.*needs peer_keys"):
        Keys.load(secret, None)
    with pytest.raises(UsageError, match=r"peer_keys.*needs key_file"):
        Keys.load(None, ring.allowed)


def test_no_secret_is_in_what_keys_print(ring):
    keys = ring.keys("a")
    assert secrets_in(f"{keys!r} {keys._own!r} {vars(keys)}", ring) == []


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "*", "[::]", "[0:0:0:0:0:0:0:0]", "[::ffff:0.0.0.0]", "224.0.0.1", "[ff02::1]"],
)
@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("binds", [False, True])
def test_wildcards_are_refused_with_keys_too(host, has_keys, binds):
    with pytest.raises(UsageError, match="no host"):
        check_address("listen", f"tcp://{host}:5000", has_keys=has_keys, binds=binds)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])
def test_wildcards_may_be_bound_where_another_address_is_advertised(host):
    told = {"binds": True, "is_advertised": True}
    check_address("listen", f"tcp://{host}:5000", has_keys=True, **told)
    with pytest.raises(UsageError, match="no host"):
        check_address("listen", f"tcp://{host}:5000", **told)
    with pytest.raises(UsageError, match="no host"):
        check_address("listen", "tcp://224.0.0.1:5000", has_keys=True, **told)


def test_a_worker_behind_a_wildcard_is_dialled_at_what_it_advertises(make, ring):
    told = "tcp://127.0.0.1:0"
    server = make("server", "tcp://0.0.0.0:0", ring.keys("server"), advertise=told)
    assert re.fullmatch(r"tcp://127\.0\.0\.1:[1-9]\d*#server", server.address)
    client = make("client", keys=ring.keys("client"))
    server._keys._next_refresh_s = 0.0
    exchange(server, client, client.dial(server.address), "there")


@pytest.mark.parametrize(
    ("advertise", "reason"),
    [
        ("tcp://0.0.0.0:5000", "no host"),
        ("tcp://10.0.0.1:5000#a", "#NAME"),
        ("ipc:///tmp/x", "one path"),
        ("10.0.0.1:5000", "must look like"),
    ],
)
def test_what_cannot_be_advertised(ring, advertise, reason):
    with pytest.raises(UsageError, match=f"^advertise: .*{reason}"):
        Channel("server", "tcp://0.0.0.0:0", ring.keys("server"), advertise=advertise)


@pytest.mark.parametrize(
    ("address", "ip"),
    [
        ("tcp://10.0.0.1:5601#prefill-0", "10.0.0.1"),
        ("tcp://[fd00::1]:5601", "fd00::1"),
        ("tcp://127.0.0.1:0", ""),
        ("tcp://localhost:0", ""),
        ("tcp://0.0.0.0:1", ""),
        ("tcp://host.example:1", ""),
        ("ipc:///a/b:1", ""),
    ],
)
def test_the_ip_that_others_dial(address, ip):
    assert ip_for_others(address) == ip


@pytest.mark.parametrize("host", ["10.0.0.1", "[fd00::1]", "192.168.1.7"])
def test_other_hosts_need_keys(host):
    for binds in (False, True):
        with pytest.raises(UsageError, match=r"keys \(key_file, peer_keys\)"):
            check_address("listen", f"tcp://{host}:5000", binds=binds)
        check_address("listen", f"tcp://{host}:5000", has_keys=True, binds=binds)


@pytest.mark.parametrize("host", ["prefill-0.example.org", "host", "a_b.c"])
def test_names_may_be_dialled_and_not_bound(host):
    check_address("address", f"tcp://{host}:5000", has_keys=True)
    with pytest.raises(UsageError, match="an IP address of this host"):
        check_address("listen", f"tcp://{host}:5000", has_keys=True, binds=True)


@pytest.mark.parametrize(
    "host", ["0", "0x7f.1", "1.2.3", "::1", "fd00::1", "[10.0.0.1]", "a..b", ""]
)
def test_what_is_neither_name_nor_address_is_refused(host):
    for text in (f"tcp://{host}:5000", f"tcp://{host};10.0.0.1:5000", f"tcp://{host} :5000"):
        with pytest.raises(UsageError, match="address"):
            check_address("address", text, has_keys=True)


def test_a_name_must_be_known_and_needs_keys(ring):
    keys = ring.keys("a")
    assert check_dial("prefill", "tcp://10.0.0.1:5#a", keys)[0] == "tcp://10.0.0.1:5"
    with pytest.raises(UsageError, match=r"prefill.*no b\.pub"):
        check_dial("prefill", "tcp://10.0.0.1:5#b", keys)
    with pytest.raises(UsageError, match=r"prefill.*key a, but there is no key_file"):
        check_dial("prefill", "tcp://127.0.0.1:5#a", None)
    ring.make("b")
    keys._next_refresh_s = 0.0
    keys.refresh()
    with pytest.raises(UsageError, match=r"must end in #NAME.* 2 are in"):
        check_dial("prefill", "tcp://10.0.0.1:5", keys)
