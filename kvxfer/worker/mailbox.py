"""The only thing that the threads of a worker share: a queue that wakes a poll."""

from __future__ import annotations

import os
import queue
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Any thread puts, one thread drains; `fileno` is readable while something waits."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_told = False
        """Whether the descriptor is readable: for all that waits, once."""

    def fileno(self) -> int:
        return self._fd

    def put(self, item: T) -> None:
        """Dropped once closed: a thread that would not stop in time has nobody to tell, and the
        number of the descriptor may be somebody else's by then."""
        with self._lock:
            if not self._is_closed:
                self._queue.put(item)
                if not self._is_told:
                    self._is_told = True
                    os.eventfd_write(self._fd, 1)

    def drain(self) -> list[T]:
        """Everything that waits, in order."""
        items: list[T] = []
        if not self._is_told:  # what is put just now makes the next poll return
            return items
        with self._lock:
            os.eventfd_read(self._fd)
            self._is_told = False
        while not self._queue.empty():
            items.append(self._queue.get_nowait())
        return items

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._fd)
