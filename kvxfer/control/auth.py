"""Keys of the control plane: who this process is, whom it lets in, and the door that asks.

Facts (libzmq 4.3.5, tried by tests/control/test_auth.py): a CURVE server asks a ZAP handler, a
socket at ZAP_ADDRESS of its own context, about each client that has proved to hold its key; where
nobody is bound there everybody is let in, unless ZAP_ENFORCE_DOMAIN is set. No message of a client
is delivered before the answer, nor of one that speaks NULL, PLAIN or an older ZMTP. A client whom
the server's key was told wrongly never gets through. The answer's user id is a property of each
message of that connection, which lasts as long as it will: a key that is revoked is dropped there.
Keys are Z85: 40 printable characters, no space among them.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from kvxfer.control.addresses import KEY_NAME
from kvxfer.errors import KvxferError, UsageError

logger = logging.getLogger(__name__)

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
DOMAIN = b"kvxfer"
ANSWERS_A_TURN = 64
"""So that a crowd at the door cannot keep the loop there."""
HANDSHAKE_MS = 10_000
"""How long a connection may take to say who it is; then it is closed."""
REFRESH_S = 1.0
"""How long a key that was taken away may still be good for."""
FRESH_NS = 2_000_000_000
"""A directory changed so lately may change once more and show the same time."""

SECRET, PUBLIC = "kvxfer-secret-key", "kvxfer-public-key"
"""First word of a key file: neither is taken for the other."""
MAX_KEY_FILE_BYTES = 1024
MAX_PEER_KEYS = 4096


@dataclass(frozen=True, slots=True)
class SecretKey:
    name: str
    public: bytes
    secret: bytes = field(repr=False)


def make_key_pair(directory: Path, name: str) -> tuple[Path, Path]:
    """Write NAME.key (secret) and NAME.pub, mode 0600, never over a file that is there.

    The directory is made with mode 0700 where there is none. Raises UsageError.
    """
    if not KEY_NAME.fullmatch(name):
        raise UsageError("name", name, "must be letters, digits, '.', '_' and '-', at most 64")
    public, secret = zmq.curve_keypair()
    paths = directory / f"{name}.key", directory / f"{name}.pub"
    written: list[Path] = []
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, kind, key in zip(paths, (SECRET, PUBLIC), (secret, public), strict=True):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            written.append(path)
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o600)  # whatever the umask is
                file.write(f"{kind} {key.decode()}\n".encode())
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        where = error.filename or str(directory)
        raise UsageError("directory", where, error.strerror or "cannot be written") from error
    return paths


def _read_key(kind: str, option: str, path: Path, forbidden_mode: int) -> bytes:
    """The key in a file that nobody else can touch as `forbidden_mode` says. Never tells what it
    holds. Raises UsageError."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(option, str(path), "is no file")
            _check_owner(option, path, found, forbidden_mode)
            words = file.read(MAX_KEY_FILE_BYTES + 1).split()
    except OSError as error:
        raise UsageError(option, str(path), error.strerror or "cannot be read") from error
    if len(words) == 2 and words[0].decode("ascii", "replace") in {SECRET, PUBLIC} - {kind}:
        reason = "holds a secret key, where a public one belongs: give it to nobody"
        if kind == SECRET:
            reason = "holds a public key, where the secret one (NAME.key) belongs"
        raise UsageError(option, str(path), reason)
    if len(words) != 2 or words[0] != kind.encode() or not _is_key(words[1]):
        raise UsageError(option, str(path), f"holds no '{kind}' as `kvxfer keygen` writes it")
    return words[1]


def _check_owner(option: str, path: Path, found: os.stat_result, forbidden_mode: int) -> None:
    """Who could write it could let anybody in; who can read a secret key is who it names.

    A file of root's may be read by its group, since root alone can have arranged that: so a
    container that does not run as root gets its key from Kubernetes (`fsGroup`)."""
    mode, own = stat.S_IMODE(found.st_mode), os.geteuid()
    if found.st_uid not in (own, 0):
        raise UsageError(option, str(path), f"must be yours; it is user {found.st_uid}'s")
    if found.st_uid != own:
        forbidden_mode &= ~stat.S_IRGRP
    if mode & forbidden_mode:
        wanted = "0600" if forbidden_mode & 0o007 == 0o007 else "written by you alone"
        raise UsageError(option, str(path), f"has mode {mode:04o}, must be {wanted}")


def _is_key(text: bytes) -> bool:
    try:
        return len(text) == 40 and z85.encode(z85.decode(text)) == text
    except (KeyError, struct.error):  # no character of Z85; five that come to more than 32 bits
        return False


def _read_directory(option: str, directory: Path) -> tuple[dict[bytes, str], tuple[int, ...]]:
    """Public keys and whose they are, and the stamp of what was read. Raises UsageError."""
    try:
        found = directory.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise UsageError(option, str(directory), "is no directory")
        _check_owner(option, directory, found, 0o022)
        paths = sorted(path for path in directory.iterdir() if path.suffix == ".pub")
    except OSError as error:
        raise UsageError(option, str(directory), error.strerror or "cannot be read") from error
    if len(paths) > MAX_PEER_KEYS:
        raise UsageError(option, str(directory), f"holds more than {MAX_PEER_KEYS} keys")
    keys: dict[bytes, str] = {}
    for path in paths:
        public = _read_key(PUBLIC, option, path, 0o022)
        if not KEY_NAME.fullmatch(path.stem):
            raise UsageError(option, str(path), "its name is none that `kvxfer keygen` gives")
        if public in keys:
            raise UsageError(option, str(path), f"holds the key of {keys[public]}.pub")
        keys[public] = path.stem
    return keys, _stamp(found)


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    """Equal later only if no key came or went; () while times are too coarse to tell that."""
    if time.time_ns() - found.st_mtime_ns < FRESH_NS:
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_mode, found.st_uid


class Keys:
    """Our secret key, and the public keys of all whom we talk to. One thread only.

    Who has one of these may do all that a peer may: see 'Security' in README.md.
    """

    def __init__(self, own: SecretKey, directory: Path) -> None:
        """Raises UsageError for a directory that is not as it should be."""
        self._own = own
        self._directory = directory
        self._peers, self._read = _read_directory("peer_keys", directory)
        self._fault = ""
        self._next_refresh_s = 0.0
        if not self._peers:
            raise UsageError("peer_keys", str(directory), "holds no NAME.pub: nobody could come in")

    @classmethod
    def load(cls, key_file: Path | None, peer_keys: Path | None) -> Keys | None:
        """None where neither is given. Raises UsageError for one without the other."""
        if key_file is None and peer_keys is None:
            return None
        if key_file is None:
            raise UsageError("peer_keys", str(peer_keys), "needs key_file, whose key we have")
        if peer_keys is None:
            raise UsageError("key_file", str(key_file), "needs peer_keys, whom to talk to")
        if not KEY_NAME.fullmatch(key_file.stem):
            raise UsageError("key_file", str(key_file), "its name is none that keygen gives")
        secret = _read_key(SECRET, "key_file", key_file, 0o077)
        return cls(SecretKey(key_file.stem, zmq.curve_public(secret), secret), peer_keys)

    @property
    def name(self) -> str:
        """Of our key: others dial 'ADDRESS#NAME', having our NAME.pub."""
        return self._own.name

    def allows(self, public: bytes) -> bool:
        return public in self._peers

    def named(self, field: str, address: str, name: str) -> bytes:
        """The public key called `name`, or the only one where that is ''. Raises UsageError."""
        found = [public for public, known in self._peers.items() if name in ("", known)]
        if len(found) == 1:
            return found[0]
        if name:
            raise UsageError(field, address, f"no {name}.pub is in {self._directory}")
        reason = f"must end in #NAME of its key: {len(self._peers)} are in {self._directory}"
        raise UsageError(field, address, reason)

    def refresh(self) -> None:
        """Once a second at the most: see whether keys came or went. While the directory is not as
        it should be, nobody is allowed."""
        now = time.monotonic()
        if now < self._next_refresh_s:
            return
        self._next_refresh_s = now + REFRESH_S
        try:
            if self._read and _stamp(self._directory.stat()) == self._read:
                return
            peers, self._read = _read_directory("peer_keys", self._directory)
            fault = ""
        except (OSError, KvxferError) as error:
            peers, fault, self._read = {}, str(error), ()
        if fault and fault != self._fault:
            logger.error("nobody is let in while this is so: %s", fault)
        elif peers != self._peers:
            gone = set(self._peers.values()) - set(peers.values())
            logger.warning("%d keys are allowed now; revoked: %s", len(peers), sorted(gone))
        self._peers, self._fault = peers, fault

    def guard(self, server: zmq.Socket[bytes]) -> None:
        """Before it binds: encrypted, and nobody comes in whom the door does not know."""
        server.setsockopt(zmq.CURVE_SERVER, 1)
        server.setsockopt(zmq.CURVE_SECRETKEY, self._own.secret)
        server.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        server.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)

    def introduce(self, client: zmq.Socket[bytes], server: bytes) -> None:
        """Before it connects: as who we are, to the holder of the public key `server` only."""
        client.setsockopt(zmq.CURVE_SERVERKEY, server)
        client.setsockopt(zmq.CURVE_PUBLICKEY, self._own.public)
        client.setsockopt(zmq.CURVE_SECRETKEY, self._own.secret)
        client.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


class Door:
    """Answers whether a key is allowed, when its owner's poller says that somebody asks."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        """Must be there before a guarded socket binds."""
        self._keys = keys
        self.num_refused = 0
        self.socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ADDRESS)

    def answer(self) -> None:
        """All who wait, ANSWERS_A_TURN at the most. Never blocks."""
        for _ in range(ANSWERS_A_TURN):
            try:
                asked = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._decide(asked))

    def _decide(self, asked: list[bytes]) -> list[bytes]:
        """libzmq asks: version, request id, domain, address, identity, mechanism, key."""
        request_id = asked[1] if len(asked) > 1 else b""
        public = b""
        if len(asked) == 7 and asked[5] == b"CURVE" and len(asked[6]) == 32:
            public = z85.encode(asked[6])
        if self._keys.allows(public):
            return [ZAP_VERSION, request_id, b"200", b"OK", public, b""]
        self.num_refused += 1
        if self.num_refused & (self.num_refused - 1) == 0:  # 1st, 2nd, 4th, 8th, ...
            whence = asked[3].decode("ascii", "replace") if len(asked) > 3 else ""
            key = public.decode()
            logger.warning(
                "let nobody in, %d times now: the public key %s of %s is not allowed",
                self.num_refused, key, whence,
            )  # fmt: skip
        return [ZAP_VERSION, request_id, b"400", b"not allowed", b"", b""]

    def close(self) -> None:
        self.socket.close()
