"""What shall become of one worker's cache, said by the test beside the service's own router."""

from __future__ import annotations

import time
from types import TracebackType

from kvxfer.control.cache_messages import CacheState, Defragment, Shrink, Sleep, WakeUp
from kvxfer.errors import KvxferError
from kvxfer.serve.router import Router

Request = Shrink | Sleep | WakeUp | Defragment
AWAKE = "the cache is awake"
CONNECT_TIMEOUT_S = 5.0


class CacheOrders:
    """A context."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> CacheOrders:
        self._router = Router(peer_timeout_s=60.0, survives_loss=True)
        try:
            (self._backend,) = self._router.connect([self._address], CONNECT_TIMEOUT_S)
        except KvxferError:
            self._router.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._router.close()

    def say(self, request: Request) -> None:
        """And wait for nothing: the worker may be about to stop."""
        self._router._channel.send(self._backend.key, request)

    def ask(self, request: Request, timeout_s: float = 5.0) -> CacheState:
        return self._router.manage(self._backend, request, timeout_s)


def wake(address: str, timeout_s: float) -> str:
    """Have the cache awake, whatever was under way; why it is not in time, or ''."""
    deadline = time.monotonic() + timeout_s
    problem = ""
    while time.monotonic() < deadline:
        try:
            with CacheOrders(address) as cache:
                problem = cache.ask(WakeUp(), 2.0).problem
        except KvxferError as error:
            problem = str(error)
        if problem in ("", AWAKE):
            return ""
        time.sleep(0.02)
    return f"{address}: not awake within {timeout_s:g} s: {problem}"
