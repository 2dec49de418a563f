"""A plain TCP stream between two processes: what no transport over TCP beats by much.

One thread sends and one receives, into the same few buffers over and over. A connection is made for
each run, and is not part of its time.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from kvxfer.bench.connectors.moves import STREAM_TIMEOUT_S
from kvxfer.errors import TransferError

PIECE_BYTES = 1 << 20
_HEAD_BYTES = 8
_READY, _DONE = b"r", b"d"


class Receiver:
    """Takes one stream after the other at `port`, in a thread of its own, until `close`."""

    def __init__(self, host: str) -> None:
        """Raises TransferError where `host` cannot be bound."""
        try:
            self._server = socket.create_server((host, 0))
        except OSError as error:
            raise TransferError(f"a plain stream cannot be taken at {host}: {error}") from error
        self.port: int = self._server.getsockname()[1]
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="stream", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        with suppress(OSError):  # `close` closed the socket; a sender who fails says so itself
            while True:
                connection, _ = self._server.accept()
                self._connection = connection
                with connection, suppress(OSError):
                    connection.settimeout(STREAM_TIMEOUT_S)
                    connection.sendall(_READY)
                    _take(connection, buffer)

    def close(self) -> None:
        """Idempotent."""
        for one in (self._server, self._connection):
            if one is not None:
                with suppress(OSError):  # it is not connected any more
                    one.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(STREAM_TIMEOUT_S)


def _take(connection: socket.socket, buffer: memoryview) -> None:
    left = int.from_bytes(connection.recv(_HEAD_BYTES, socket.MSG_WAITALL), "little")
    while left:
        size = connection.recv_into(buffer[: min(left, PIECE_BYTES)])
        if size == 0:
            return
        left -= size
    connection.sendall(_DONE)


def send_stream(host: str, port: int, size_bytes: int) -> float:
    """Seconds from the first byte to the receiver's word that it has all. Raises TransferError."""
    data = memoryview(bytearray(min(size_bytes, PIECE_BYTES)))
    try:
        with socket.create_connection((host, port), STREAM_TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if connection.recv(1) != _READY:
                raise TransferError("a plain stream was not taken")
            start = time.perf_counter()
            connection.sendall(size_bytes.to_bytes(_HEAD_BYTES, "little"))
            for offset in range(0, size_bytes, PIECE_BYTES):
                connection.sendall(data[: min(PIECE_BYTES, size_bytes - offset)])
            if connection.recv(1) != _DONE:
                raise TransferError("a plain stream was cut short")
            return time.perf_counter() - start
    except OSError as error:
        raise TransferError(f"a plain stream to {host}:{port}: {error}") from error
