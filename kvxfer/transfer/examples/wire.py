"""The example's own channel: one TCP connection, frames of a length and so many bytes.

An engine has something better already. This one says nothing about who is at the other end, so it
is for one machine.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

TIMEOUT_S = 30.0
POLL_S = 0.001


class Wire:
    """While it waits it polls: peers may need the endpoint meanwhile."""

    def __init__(self, connection: socket.socket, poll: Callable[[], object]) -> None:
        self._socket = connection
        self._poll = poll

    @classmethod
    def listen(cls, address: str, poll: Callable[[], object]) -> Wire:
        with socket.create_server(_split(address)) as server:
            server.settimeout(TIMEOUT_S)
            return cls(server.accept()[0], poll)

    @classmethod
    def dial(cls, address: str, poll: Callable[[], object]) -> Wire:
        """Tries until the other one listens."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            with suppress(ConnectionRefusedError):
                return cls(socket.create_connection(_split(address), TIMEOUT_S), poll)
            time.sleep(0.05)
        raise TimeoutError(f"nobody listens on {address}")

    def send(self, data: bytes) -> None:
        self._socket.settimeout(TIMEOUT_S)
        self._socket.sendall(len(data).to_bytes(8, "little") + data)

    def receive(self) -> bytes:
        return self._take(int.from_bytes(self._take(8), "little"))

    def tell(self, **what: Any) -> None:
        self.send(json.dumps(what).encode())

    def hear(self) -> Any:
        return json.loads(self.receive())

    def close(self) -> None:
        self._socket.close()

    def _take(self, size: int) -> bytes:
        data = b""
        self._socket.settimeout(POLL_S)
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(data) < size:
            self._poll()
            with suppress(TimeoutError):
                part = self._socket.recv(size - len(data))
                if not part:
                    raise ConnectionError("the other script hung up")
                data += part
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the other script said nothing for {TIMEOUT_S:g} s")
        return data


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
