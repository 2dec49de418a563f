"""What a link between two namespaces carries: plain TCP, and a connector between bare caches."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from kvxfer.bench.isolated import LAST_WORDS_S
from kvxfer.bench.namespaces import NamespacesOptions
from kvxfer.bench.netns import ADDRESSES, DEVICE, OVER_TCP, Namespaces, enter
from kvxfer.bench.report import Figure
from kvxfer.bench.transfer_pair import Pair, Process
from kvxfer.bench.transfer_rounds import run_verified, setup_of, work_of, write_sources
from kvxfer.bench.transfer_shapes import MIB, shape_of
from kvxfer.errors import DeadlineExceeded, TransferError, WorkerDied
from kvxfer.transfer.connector import Direction

RATE_BAR = 0.93
"""Of plain TCP over the same link, and of the link's nominal rate, of which TCP's headers take a
twentieth."""
RUN_KIB = 64
"""Of the bare caches: a page of the model that the other benches measure with."""

SIDES = {"source": "left", "target": "right"}
ANSWER_TIMEOUT_S = 60.0
_PIECE_BYTES = 1 << 20
_DONE = b"."


def link_figures(namespaces: Namespaces, options: NamespacesOptions) -> Iterator[Figure]:
    """Rates of plain TCP and of both directions of NIXL, in turn."""
    nominal_gbps = options.mbit / 8e3
    size = options.mib * MIB
    setup = setup_of([shape_of(RUN_KIB)], size)
    works = [work_of(direction, setup, size, (0, 0), direction) for direction in Direction]
    found: dict[str, list[float]] = {"tcp": [], **{work.name: [] for work in works}}
    with PlainTcp(namespaces) as tcp, PairApart(namespaces) as pair:
        pair.open("nixl", setup)
        write_sources(pair, works)
        before = namespaces.sent_bytes("left")
        for run in range(-options.warm_up, options.runs):
            this = {"tcp": size / tcp.run(size) / 1e9}
            this |= {work.name: run_verified(pair, work)[0] for work in works}
            if run >= 0:
                for name, rate in this.items():
                    found[name].append(rate)
        sent = namespaces.sent_bytes("left") - before
    least = (options.warm_up + options.runs) * size * len(found)
    if sent < least:
        raise TransferError(f"{DEVICE} carried {sent} bytes of {least}: they took another way")
    yield Figure.of("link: plain TCP", found["tcp"], "GB/s", "higher")
    yield _share("link: plain TCP", found["tcp"], nominal_gbps, None)
    for work in works:
        rates = found[work.name]
        shares = [rate / plain for rate, plain in zip(rates, found["tcp"], strict=True)]
        name = f"hand-over, NIXL {work.name}"
        yield Figure.of(name, rates, "GB/s", "higher")
        yield Figure.of(f"{name}: share of plain TCP", shares, "×", "higher", RATE_BAR)
        yield _share(name, rates, nominal_gbps, RATE_BAR)


def _share(name: str, rates: list[float], nominal_gbps: float, bar: float | None) -> Figure:
    shares = [rate / nominal_gbps for rate in rates]
    return Figure.of(f"{name}: share of the link's nominal rate", shares, "×", "higher", bar)


class PairApart(Pair):
    """A source on the left of the link and a target on the right, host memory on both."""

    def __init__(self, namespaces: Namespaces) -> None:
        super().__init__("cpu", "cpu", OVER_TCP)
        self.start = partial(_start_apart, namespaces)


def _start_apart(
    namespaces: Namespaces,
    ours: Connection,
    theirs: Connection,
    role: str,
    device: str,
    environment: Mapping[str, str],
) -> Process:
    context = multiprocessing.get_context("spawn")
    arguments = (namespaces.paths(SIDES[role]), theirs, role, device, environment)
    process = context.Process(target=_serve_apart, args=arguments)
    process.start()
    theirs.close()
    return process


def _serve_apart(paths: Mapping[str, str], *arguments: Any) -> None:
    enter(paths)  # before anything starts a thread
    from kvxfer.bench.transfer_serve import serve_process

    serve_process(*arguments)


class PlainTcp:
    """A TCP connection over the link, kept open; a context. What no transport above it can beat."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces
        self._undo = ExitStack()
        self._sender: Connection

    def __enter__(self) -> PlainTcp:
        with ExitStack() as undo:
            receiver = self._start("right", _receive, undo)
            port: int = _hear(receiver)
            self._sender = self._start("left", partial(_send, port), undo)
            _hear(self._sender)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def run(self, size_bytes: int) -> float:
        """Seconds from the first byte sent to the receiver's word that it has all of them."""
        self._sender.send(size_bytes)
        seconds: float = _hear(self._sender)
        return seconds

    def _start(self, side: str, work: Any, undo: ExitStack) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_plain, args=(self._namespaces.paths(side), theirs, work))
        process.start()
        undo.callback(_end, process, ours)
        theirs.close()
        return ours


def _end(process: Any, pipe: Connection) -> None:
    pipe.close()
    process.join(LAST_WORDS_S)
    if process.is_alive():
        process.kill()
        process.join(LAST_WORDS_S)


def _hear(pipe: Connection) -> Any:
    if not pipe.poll(ANSWER_TIMEOUT_S):
        raise DeadlineExceeded(f"plain TCP: no answer within {ANSWER_TIMEOUT_S:g} s")
    try:
        answer = pipe.recv()
    except EOFError:
        raise WorkerDied("plain TCP: one of its processes ended") from None
    if isinstance(answer, str):
        raise TransferError(f"plain TCP: {answer}")
    return answer


def _plain(paths: Mapping[str, str], pipe: Connection, work: Any) -> None:
    """A process's main: until the other end of `pipe`, or of the connection, closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle: it closes the pipe
    enter(paths)
    try:
        work(pipe)
    except EOFError:
        return
    except OSError as error:
        pipe.send(str(error))


def _receive(pipe: Connection) -> None:
    """Says its port; then of each message, 8 bytes that tell its size and the bytes, that it has
    it."""
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with socket.create_server((ADDRESSES["right"], 0)) as server:
        server.settimeout(ANSWER_TIMEOUT_S)
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
    with closing(connection):
        while head := connection.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(head, "little")
            while left:
                size = connection.recv_into(buffer[: min(left, _PIECE_BYTES)])
                if size == 0:
                    return
                left -= size
            connection.sendall(_DONE)


def _send(port: int, pipe: Connection) -> None:
    """Of each size that it is told: sends as much, and answers how long it took."""
    data = memoryview(bytearray(_PIECE_BYTES))
    with socket.create_connection((ADDRESSES["right"], port), ANSWER_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pipe.send(port)
        while True:
            size: int = pipe.recv()
            start = time.perf_counter()
            connection.sendall(size.to_bytes(8, "little"))
            for offset in range(0, size, _PIECE_BYTES):
                connection.sendall(data[: min(_PIECE_BYTES, size - offset)])
            if connection.recv(1) != _DONE:
                pipe.send("the connection closed")
                return
            pipe.send(time.perf_counter() - start)
