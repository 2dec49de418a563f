"""The workers of a router: dialled, greeted, asked how they are, and drained.

States: see `kvxfer.serve.backend`.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from kvxfer.control.channel import Channel
from kvxfer.control.messages import WIRE_VERSION, Goodbye, Heartbeat, Hello, Message, Welcome
from kvxfer.control.router_messages import Cancel, Drain, Prefills, StatusQuery
from kvxfer.errors import ControlError, UsageError
from kvxfer.serve.backend import Backend, BackendState

logger = logging.getLogger(__name__)

HELLO_RETRY_S = 1.0
HELLO_RETRY_MAX_S = 5.0
HEARTBEAT_S = 0.5
STATUS_S = 0.5
"""Between two questions how a worker is. What a router told workers is told again then: who is
there, and that they shall drain."""
UP = (BackendState.READY, BackendState.DRAINING)


class Fleet:
    """One thread. `lost(backend, reason)` is called for each worker that is there no longer, also
    for one that was drained or removed, in its new state."""

    def __init__(
        self, channel: Channel, peer_timeout_s: float, lost: Callable[[Backend, str], None]
    ) -> None:
        self._channel = channel
        self._peer_timeout_s = peer_timeout_s
        self._lost = lost
        self.backends: dict[str, Backend] = {}
        self.watches = False
        """Whether workers are asked how they are."""
        self.announces = False
        """Whether decode workers are told which prefill workers there are."""
        self._next_beat_s = 0.0
        self._next_status_s = 0.0

    def dial(self, address: str, role: str = "") -> Backend:
        """The worker there, greeted from now on. Raises UsageError."""
        key = self._channel.dial(address)
        return self.backends.setdefault(key, Backend(key, role=role))

    def add(self, address: str, role: str) -> Backend:
        """As `dial`; decode workers are told of it if it is a prefill worker."""
        backend = self.dial(address, role)
        self.watches = self.announces = True
        self.announce()
        return backend

    def find(self, worker: str) -> Backend:
        """By worker id, or by the address that was dialled. Raises UsageError."""
        for backend in self.backends.values():
            if worker in (backend.name, backend.address):
                return backend
        known = ", ".join(backend.name for backend in self.backends.values()) or "none"
        raise UsageError("worker", worker, f"no such worker; there are: {known}")

    def taking(self, role: str) -> list[Backend]:
        """Those that may be given something new."""
        return [one for one in self.backends.values() if one.takes_new and one.role == role]

    # --- joining and leaving ------------------------------------------------------------------

    def drain(self, worker: str, reason: str) -> Backend:
        """Nothing new goes to it; it is DRAINED once it has finished. One that is not there now is
        forgotten at once. Raises UsageError."""
        backend = self.find(worker)
        if backend.state is BackendState.GREETING:
            self.forget(backend, BackendState.GONE, f"drained while it was not there: {reason}")
            return backend
        backend.is_leaving, backend.drain_reason = True, reason
        self.drains(backend, reason)
        self.send(backend, Drain(reason))
        return backend

    def drains(self, backend: Backend, reason: str) -> None:
        """It takes nothing new: we asked for that, or it says so by itself."""
        if backend.state is BackendState.READY:
            logger.info("worker %s drains: %s", backend.name, reason)
            backend.state = BackendState.DRAINING
            self.announce()

    def remove(self, worker: str, reason: str) -> Backend:
        """Forget it at once. Raises UsageError."""
        backend = self.find(worker)
        if backend.state in UP:
            self.send(backend, Goodbye(reason, is_quiet=False))
        self.forget(backend, BackendState.GONE, reason)
        return backend

    def forget(self, backend: Backend, state: BackendState, reason: str) -> None:
        """It is no worker of this router any more."""
        name = backend.name
        logger.info("worker %s is %s: %s", name, state.name.lower(), reason)
        backend.state = state
        self.backends.pop(backend.key, None)
        self._channel.hang_up(backend.key)
        self._lost(backend, reason)
        self.announce()

    def lose(self, backend: Backend, reason: str, *, left: bool = False) -> None:
        """It is not there: silent, another process, or it `left` by its own word."""
        if backend.state not in UP:
            return
        if backend.is_leaving:
            state = BackendState.DRAINED if left else BackendState.GONE
            self.forget(backend, state, reason)
            return
        self._lost(backend, reason)
        backend.facts, backend.state = None, BackendState.GREETING
        backend.hello_at_s, backend.hello_pause_s = 0.0, 0.0
        backend.status, backend.status_s = {}, 0.0
        backend.has_cached, backend.num_of_others, backend.num_ours = False, 0, 0

    def announce(self) -> None:
        """Tell decode workers who prefills: all but those that were asked to leave. Nothing is said
        while nobody was ever added, since they may know some by themselves."""
        if not self.announces:
            return
        known = self.backends.values()
        prefills = [one for one in known if one.role == "prefill" and not one.is_leaving]
        message = Prefills([one.address for one in prefills])
        for backend in known:
            if backend.role == "decode" and backend.state is BackendState.READY:
                self.send(backend, message)

    # --- being there --------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Greet, stay alive towards them, ask, and notice those that died."""
        for backend in list(self.backends.values()):
            if backend.facts is None:
                self._greet(backend, now)
            elif now - backend.last_seen_s > self._peer_timeout_s:
                self.lose(backend, f"nothing heard for {self._peer_timeout_s:g} s")
        up = [one for one in self.backends.values() if one.state in UP]
        if now >= self._next_beat_s:
            self._next_beat_s = now + HEARTBEAT_S
            for backend in up:
                self.send(backend, Heartbeat())
        if self.watches and now >= self._next_status_s:
            self._next_status_s = now + STATUS_S
            for backend in up:
                self.send(backend, StatusQuery())
                if backend.is_leaving:
                    self.send(backend, Drain(backend.drain_reason))
            self.announce()

    def _greet(self, backend: Backend, now: float) -> None:
        """Again and again, with longer pauses of uneven length."""
        if now >= backend.hello_at_s and self.send(backend, Hello(WIRE_VERSION, None)):
            pause = min(HELLO_RETRY_MAX_S, 2 * backend.hello_pause_s or HELLO_RETRY_S)
            backend.hello_pause_s = pause
            backend.hello_at_s = now + pause * random.uniform(0.75, 1.25)

    def welcomed(self, backend: Backend, welcome: Welcome) -> None:
        known = backend.facts
        if known is not None and known.incarnation != welcome.facts.incarnation:
            self.lose(backend, "a new process answers")
        if backend.state not in (*UP, BackendState.GREETING):
            return  # it was to leave
        if backend.role not in ("", welcome.facts.role):
            logger.warning("%s is a %s worker", backend.address, welcome.facts.role)
        backend.facts, backend.role = welcome.facts, welcome.facts.role
        if backend.state is BackendState.GREETING:
            backend.state = BackendState.READY
        backend.hello_pause_s = 0.0
        for request_id in backend.given_up:
            self.send(backend, Cancel(request_id))
        backend.given_up.clear()
        if self.watches:
            self.send(backend, StatusQuery())
        self.announce()

    def send(self, backend: Backend, message: Message) -> bool:
        try:
            self._channel.send(backend.key, message)
        except ControlError:
            return False  # its silence will be noticed
        return True

    def heard(self, backend: Backend) -> None:
        backend.last_seen_s = time.monotonic()
