"""A real proxy of bytes between a dialler and a listener: whatever they say, encrypted or not, is
delayed, slowed down or cut, as a link would be; TCP keeps it whole and in order."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field

CHUNK_BYTES = 1 << 14
TICK_S = 0.002


@dataclass
class _Pipe:
    """One direction of one connection."""

    source: socket.socket
    target: socket.socket
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)


class TcpProxy:
    """A context; a thread of its own. May be changed at any time: `hold_s` of every byte,
    `is_frozen` (bytes wait, connections stay: a link that is cut), and `sever()`."""

    def __init__(self, target: str, port: int) -> None:
        host, _, number = target.removeprefix("tcp://").rpartition(":")
        self._target = host, int(number)
        self.address = f"tcp://127.0.0.1:{port}"
        self.hold_s = 0.0
        self.is_frozen = False
        self.num_severed = 0
        self._listener = socket.create_server(("127.0.0.1", port))
        self._listener.setblocking(False)
        self._pipes: list[_Pipe] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="tcp-proxy")

    def __enter__(self) -> TcpProxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(10.0)
        self.sever()
        self._listener.close()
        assert not self._thread.is_alive()

    def sever(self) -> None:
        """End all connections; new ones are taken."""
        with self._lock:
            for pipe in self._pipes:
                pipe.source.close()
                self.num_severed += 1
            self._pipes.clear()

    def _main(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                self._accept()
                for pipe in list(self._pipes):
                    if not self._turn(pipe):
                        self._end(pipe)
            time.sleep(TICK_S)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(self._target, 1.0)
            except OSError:
                near.close()
                return
            for one in (near, far):
                one.setblocking(False)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pipes += [_Pipe(near, far), _Pipe(far, near)]

    def _turn(self, pipe: _Pipe) -> bool:
        """False where a side has ended."""
        if self.is_frozen:
            return True
        try:
            data = pipe.source.recv(CHUNK_BYTES)
            if not data:
                return False
            pipe.waiting.append((time.monotonic() + self.hold_s, data))
        except BlockingIOError:
            pass
        except OSError:
            return False
        while pipe.waiting and pipe.waiting[0][0] <= time.monotonic():
            due_s, data = pipe.waiting.popleft()
            try:
                sent = pipe.target.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return False
            if sent < len(data):
                pipe.waiting.appendleft((due_s, data[sent:]))
                break
        return True

    def _end(self, pipe: _Pipe) -> None:
        ends = {pipe.source, pipe.target}
        for one in ends:
            one.close()
        self._pipes = [other for other in self._pipes if other.source not in ends]
