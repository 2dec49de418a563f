"""The far side of two machines that measure together: serves whoever dials, one at a time."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from kvxfer.bench.connectors.far import (
    ALIVE_S,
    ARGUMENTS,
    RESULTS,
    SILENCE_S,
    VERSION,
    Alive,
    Begin,
    Begun,
    Busy,
    Call,
    End,
    Failed,
    FarChannel,
    Message,
    Result,
    host_of,
    keys_of,
    pack,
    tcp_address,
    unpack,
)
from kvxfer.bench.connectors.lanes import BACKEND, STORAGE_BACKENDS
from kvxfer.bench.connectors.options import ConnectorsOptions
from kvxfer.bench.connectors.pair import start_process
from kvxfer.bench.isolated import LAST_WORDS_S
from kvxfer.bench.transfer_pair import Process
from kvxfer.errors import ControlError, WireError

ROLE = "target"
_TURN_S = 0.2


def listen(options: ConnectorsOptions) -> int:
    """Serve until Ctrl-C. Raises UsageError for an address or keys that are refused."""
    from kvxfer.bench.report import describe_machine

    address = tcp_address("listen", options.listen)
    keys = keys_of(options.key_file, options.peer_keys)
    channel = FarChannel(f"bench-far-{os.getpid()}", address, keys)
    with ExitStack() as undo:
        undo.callback(channel.close)
        server = Server(channel, describe_machine("cpu"), host_of(channel.address))
        undo.callback(server.end)
        print(f"listening at {channel.address}; Ctrl-C ends it", flush=True)
        while True:
            server.turn()


@dataclass(slots=True)
class _Session:
    """Who is served, and the process that does it, from the first call on."""

    peer: str
    begin: Begin
    heard_s: float
    told_s: float
    pipe: Connection | None = None
    process: Process | None = None
    verb: str = ""
    """That the process was asked last."""


@dataclass(slots=True)
class Server:
    """Everything but the loop. One thread only."""

    channel: FarChannel
    machine: str
    host: str
    _session: _Session | None = field(default=None)

    def turn(self) -> None:
        """Wait a little, and do what there is to do."""
        for peer, message in self.channel.hear(_TURN_S):
            self._take(peer, message)
        session = self._session
        if session is None:
            return
        if session.pipe is not None:
            self._pass_on(session, session.pipe)
        now_s = time.monotonic()
        if now_s - session.heard_s > SILENCE_S:
            print(f"lost: nothing was heard for {SILENCE_S:g} s", flush=True)
            self.end()
        elif now_s - session.told_s > ALIVE_S:
            self._tell(session, Alive())

    def end(self) -> None:
        """Of the session, and of its process, whatever it does. Idempotent."""
        session, self._session = self._session, None
        if session is None or session.pipe is None or session.process is None:
            return
        self.channel.unwatch(session.pipe.fileno())
        session.pipe.close()
        session.process.join(LAST_WORDS_S)
        if session.process.is_alive():
            session.process.kill()
            session.process.join(LAST_WORDS_S)

    def _take(self, peer: str, message: Message) -> None:
        session = self._session
        if isinstance(message, Begin):
            self._begin(peer, message)
        elif session is None or session.peer != peer:
            return  # of a session that is over
        elif isinstance(message, End):
            self.end()
        elif isinstance(message, Call):
            session.heard_s = time.monotonic()
            self._call(session, message)
        elif isinstance(message, Alive):
            session.heard_s = time.monotonic()

    def _begin(self, peer: str, begin: Begin) -> None:
        now_s = time.monotonic()
        fresh = _Session(peer, begin, now_s, now_s)
        if self._session is not None and self._session.peer != peer:
            self._tell(fresh, Busy())
            return
        self.end()
        if reason := why_not(begin):
            self._tell(fresh, Failed(reason, is_over=True))
            return
        self._session = fresh
        self._tell(fresh, Begun(self.machine, self.host))

    def _call(self, session: _Session, call: Call) -> None:
        try:
            arguments = unpack(ARGUMENTS, call.verb, call.arguments)
        except WireError as error:
            self._tell(session, Failed(str(error), is_over=False))
            return
        if call.verb == "stream_open":
            arguments = (self.host,)  # at the address that was given to us, and no other
        if session.pipe is None:
            self._start(session)
        session.verb = call.verb
        try:
            assert session.pipe is not None
            session.pipe.send((call.verb, arguments))
        except OSError:
            self._over(session)

    def _start(self, session: _Session) -> None:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        environment = {BACKEND: session.begin.backend} if session.begin.backend else {}
        device = session.begin.device
        session.process = start_process(ours, theirs, ROLE, device, environment)
        session.pipe = ours
        self.channel.watch(ours.fileno())

    def _pass_on(self, session: _Session, pipe: Connection) -> None:
        """Answers of the process."""
        try:
            while pipe.poll(0):
                is_error, value = pipe.recv()
                answer = Failed(value, is_over=False) if is_error else None
                self._tell(session, answer or Result(pack(RESULTS, session.verb, value)))
                if self._session is not session:
                    return
        except (EOFError, OSError):
            self._over(session)

    def _over(self, session: _Session) -> None:
        """The process ended by itself."""
        assert session.process is not None
        session.process.join(LAST_WORDS_S)
        words = f"the {ROLE}'s process ended with code {session.process.exitcode}"
        print(words, flush=True)
        self._tell(session, Failed(words, is_over=True))
        self.end()

    def _tell(self, session: _Session, message: Message) -> None:
        try:
            self.channel.tell(session.peer, message)
            session.told_s = time.monotonic()
        except ControlError:
            self.end()  # who dialled has gone


def why_not(begin: Begin) -> str:
    """Why a session cannot begin here, or ''."""
    from kvxfer.bench.connectors.run import count_gpus

    if begin.version != VERSION:
        return f"version {begin.version} of the bench is not ours, {VERSION}"
    found = re.fullmatch(r"cpu|cuda:([0-9]{1,3})", begin.device)
    if found is None or (found[1] is not None and int(found[1]) >= count_gpus()):
        return f"no device {begin.device!r} is there"
    if begin.backend.upper() in STORAGE_BACKENDS or not re.fullmatch(r"\w{0,32}", begin.backend):
        return f"no backend {begin.backend!r} is there"
    return ""
