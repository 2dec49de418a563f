"""The life of a worker process: options in, exit code out, nothing left behind.

Imports nothing heavy: bad options are refused, and the port is bound and told to the launcher,
before seconds are spent on torch (see `kvxfer.worker.assembly`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvxfer.config import WorkerOptions, check_device, resolve
from kvxfer.control.addresses import ip_for_others
from kvxfer.control.auth import Keys
from kvxfer.control.channel import Channel, check_dial
from kvxfer.errors import KvxferError, UsageError, WorkerDied
from kvxfer.telemetry.log_rate import one_line
from kvxfer.telemetry.logs import set_up_logging
from kvxfer.telemetry.spans import check_endpoint
from kvxfer.transfer.connector import DATA_ADDRESS, check_connectors
from kvxfer.transfer.lanes import LANES
from kvxfer.worker.layouts import asked_layout

if TYPE_CHECKING:
    from kvxfer.worker.assembly import MakeRole, StartEngine

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1


class StopRequested(BaseException):
    """SIGINT or SIGTERM before the control loop runs: unwind and leave."""


class StopSignal:
    """Whether to stop was asked for, before the control loop takes that over.

    Python drops what is raised while an object's `__del__` runs, as it does a thousandfold when
    the heap is collected after the start. So the request is remembered, and `check` raises again.
    """

    def __init__(self) -> None:
        self._is_requested = False

    def request(self) -> None:
        self._is_requested = True
        raise StopRequested

    def check(self) -> None:
        """Raises StopRequested."""
        if self._is_requested:
            raise StopRequested


class Announcer:
    """Tells a launcher, over a pipe it gave us, how far the start has come. `check` is called at
    each step, and may raise."""

    def __init__(self, fd: int, check: Callable[[], None] = lambda: None) -> None:
        self._fd = fd
        self._check = check

    def step(self, text: str) -> None:
        self._check()
        logger.info("%s", text)
        self._write({"event": "step", "text": text})

    def listening(self, address: str, worker_id: str) -> None:
        logger.info("%s listens on %s", worker_id, address)
        self._write({"event": "listening", "address": address, "worker_id": worker_id})

    def ready(self) -> None:
        self._check()
        logger.info("ready")
        self._write({"event": "ready"})

    def failed(self, text: str) -> None:
        with contextlib.suppress(WorkerDied):  # nobody left to tell
            self._write({"event": "failed", "text": text})

    def _write(self, record: dict[str, str]) -> None:
        if self._fd < 0:
            return
        try:
            os.write(self._fd, (json.dumps(record) + "\n").encode())
        except BrokenPipeError:
            raise WorkerDied("the launcher is gone") from None


@dataclass(frozen=True)
class Setting:
    """What a bench may put in a part's place; each is called once, in the worker's process."""

    channel: Callable[..., Channel] = Channel
    load_start: Callable[[], StartEngine] | None = None
    """Imports what starts the engine, where that is not `start_engine`."""


AS_IN_SERVICE = Setting()


def run_worker(
    role: str,
    options: WorkerOptions,
    dial: Sequence[str],
    make_role: MakeRole,
    setting: Setting = AS_IN_SERVICE,
) -> int:
    """Run one worker until it is told to stop. Returns the exit code."""
    set_up_logging(role, options.worker_id, options.log_format)
    stop = StopSignal()
    announcer = Announcer(options.ready_fd, stop.check)
    try:
        with handle_signals(stop.request):
            _run(role, options, dial, make_role, announcer, setting)
        code = 0
    except StopRequested:
        code = 0
    except KvxferError as error:
        announcer.failed(str(error))
        if options.log_format == "json":
            logger.critical("%s", error)
        else:
            print(f"{role}: error: {one_line(str(error))}", file=sys.stderr, flush=True)
        code = error.exit_code
    if threading.active_count() > 1:  # a thread that would not stop must not hold up the end
        logging.shutdown()
        os._exit(code)
    return code


def _run(
    role: str,
    options: WorkerOptions,
    dial: Sequence[str],
    make_role: MakeRole,
    announcer: Announcer,
    setting: Setting,
) -> None:
    if options.ready_fd >= 0:
        end_with_parent()
    options = resolve(options, role)
    set_up_logging(role, options.worker_id, options.log_format)
    _check_cheaply(options)
    keys = Keys.load(options.key_file, options.peer_keys)
    for address in dial:
        check_dial("prefill", address, keys)
    incarnation = secrets.token_hex(8)
    identity = f"{options.worker_id}.{incarnation}"
    told = {"advertise": options.advertise} if options.advertise else {}
    channel = setting.channel(identity, options.listen, keys, **told)
    _tell_connectors(options)
    try:
        announcer.listening(channel.address, options.worker_id)
        announcer.step("importing torch and transformers")
        from kvxfer.worker.assembly import serve
        from kvxfer.worker.engine import start_engine

        start = setting.load_start() if setting.load_start is not None else start_engine
        serve(role, options, incarnation, channel, dial, make_role, announcer, start)
    finally:
        channel.close()


def _tell_connectors(options: WorkerOptions) -> None:
    """By which of this host's addresses others reach it: by the environment, which the processes of
    a worker's ranks have as well."""
    ip = ip_for_others(options.advertise or options.listen)
    if ip:
        os.environ.setdefault(DATA_ADDRESS, ip)


def _check_cheaply(options: WorkerOptions) -> None:
    """Refuse bad values before seconds are spent on imports."""
    asked_layout(options).by_kind()
    check_device(options.device)
    check_connectors(options.connector)
    check_endpoint(options.otlp_traces_endpoint)
    if options.lane not in LANES:
        raise UsageError("lane", options.lane, f"must be one of {', '.join(LANES)}")


@contextlib.contextmanager
def handle_signals(act: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call `act` in the main thread."""
    old = {
        number: signal.signal(number, lambda *_: act())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Have the kernel kill this process when its launcher dies, however it dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        logger.warning(
            "prctl failed with %d: this worker may outlive its launcher", ctypes.get_errno()
        )
