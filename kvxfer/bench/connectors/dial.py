"""The near side of two machines that measure together: the source is here, the target there."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping
from functools import partial
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
    keys_of,
    pack,
    tcp_address,
    unpack,
)
from kvxfer.bench.connectors.lanes import BACKEND
from kvxfer.bench.connectors.options import ConnectorsOptions
from kvxfer.bench.connectors.pair import ConnectorsPair, start_process
from kvxfer.bench.transfer_pair import Process
from kvxfer.errors import ControlError, KvxferError, UsageError, WorkerDied

CONNECT_TIMEOUT_S = 10.0
_TURN_S = 0.1


class Far:
    """A far end that listens: found when entered, and gone to once for each pair."""

    def __init__(self, options: ConnectorsOptions) -> None:
        self._options = options
        self._address = tcp_address("peer", options.peer)
        self.machine = ""
        """What it says it is."""
        self._host = ""

    def __enter__(self) -> Far:
        """Raises UsageError for an address or keys that are refused here, WorkerDied where nobody
        answers."""
        session = self._session("cpu", {})
        with session:
            begun = session.begin()
        self.machine, self._host = begun.machine, begun.host
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing of it is held between sessions."""

    def make_pair(self, devices: tuple[str, str], environment: dict[str, str]) -> ConnectorsPair:
        pair = ConnectorsPair(*devices, environment)
        pair.target_host = self._host
        pair.start = partial(_start, self)
        return pair

    def start_target(self, theirs: Connection, device: str, env: Mapping[str, str]) -> FarProcess:
        process = FarProcess(self._session(device, env), theirs)
        process.start()
        return process

    def _session(self, device: str, environment: Mapping[str, str]) -> Session:
        keys = keys_of(self._options.key_file, self._options.peer_keys)
        channel = FarChannel(f"bench-{os.getpid()}-{secrets.token_hex(4)}", None, keys)
        try:
            channel.check_dial("peer", self._address)
        except UsageError:
            channel.close()
            raise
        begin = Begin(VERSION, device, environment.get(BACKEND, ""))
        return Session(channel, self._address, begin)


def _start(
    far: Far,
    ours: Connection,
    theirs: Connection,
    role: str,
    device: str,
    environment: Mapping[str, str],
) -> Process:
    if role == "target":
        return far.start_target(theirs, device, environment)
    return start_process(ours, theirs, role, device, environment)


class Session:
    """Talks to the far end over a channel of its own; a context. Used by one thread at a time."""

    def __init__(self, channel: FarChannel, address: str, begin: Begin) -> None:
        self._channel = channel
        self._address = address
        self._begin = begin
        self._peer = ""
        self._heard_s = self._told_s = time.monotonic()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        if self._peer:
            try:
                self._channel.tell(self._peer, End())
            except ControlError:
                self._peer = ""  # it is gone already
        self._channel.close()

    def begin(self) -> Begun:
        """Raises WorkerDied where it does not answer, or is busy."""
        peer = self._channel.dial(self._address)
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if not self._peer:
                try:
                    self._channel.tell(peer, self._begin)
                    self._peer = peer
                except ControlError:
                    time.sleep(_TURN_S)  # it is not connected yet
            for _, message in self._channel.hear(_TURN_S):
                if isinstance(message, Begun):
                    self._heard_s = time.monotonic()
                    return message
                self._check(message)
        raise WorkerDied(
            f"the far end at {self._address} did not answer within {CONNECT_TIMEOUT_S:g} s"
        )

    def watch(self, pipe: Connection) -> None:
        self._channel.watch(pipe.fileno())

    def tell(self, message: Message) -> None:
        """Raises WorkerDied where the connection is gone."""
        try:
            self._channel.tell(self._peer, message)
        except ControlError:
            raise WorkerDied(f"the far end at {self._address} is gone") from None
        self._told_s = time.monotonic()

    def hear(self) -> list[Message]:
        """What came. Raises WorkerDied where nothing comes any more, or it said that it is over."""
        found = [message for _, message in self._channel.hear(_TURN_S)]
        now_s = time.monotonic()
        if found:
            self._heard_s = now_s
        elif now_s - self._heard_s > SILENCE_S:
            raise WorkerDied(f"the far end at {self._address} said nothing for {SILENCE_S:g} s")
        if now_s - self._told_s > ALIVE_S:
            self.tell(Alive())
        for message in found:
            self._check(message)
        return found

    def _check(self, message: Message) -> None:
        if isinstance(message, Busy):
            raise WorkerDied(f"the far end at {self._address} is busy with somebody else")
        if isinstance(message, Failed) and message.is_over:
            raise WorkerDied(f"the far end at {self._address}: {message.error}")


class FarProcess(threading.Thread):
    """The target's process as its pair sees it: what is asked through a pipe is asked of the far
    end. `why` tells how it ended, where badly."""

    def __init__(self, session: Session, theirs: Connection) -> None:
        super().__init__(name="far end", daemon=True)
        self._session = session
        self._ours = theirs
        self._stop_asked = threading.Event()
        self._verb = ""
        self.why = ""

    @property
    def exitcode(self) -> int | None:
        return None if self.is_alive() else int(bool(self.why))

    @property
    def pid(self) -> int | None:
        """It is another machine's."""
        return None

    def kill(self) -> None:
        self._stop_asked.set()

    def run(self) -> None:
        with self._ours, self._session:
            try:
                self._session.begin()
                self._session.watch(self._ours)
                while not self._stop_asked.is_set():
                    self._answer(self._session.hear())
                    if not self._ask():
                        return
            except KvxferError as error:
                self.why = str(error)

    def _ask(self) -> bool:
        """Pass on what the pair asks; False when it has gone."""
        try:
            while self._ours.poll(0):
                self._verb, arguments = self._ours.recv()
                self._session.tell(Call(self._verb, pack(ARGUMENTS, self._verb, arguments)))
        except (EOFError, OSError):
            return False
        return True

    def _answer(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Result):
                self._ours.send((False, unpack(RESULTS, self._verb, message.value)))
            elif isinstance(message, Failed):
                self._ours.send((True, message.error))
