"""The loop of each of the two processes of a transfer bench: asked, it answers.

A message from the parent is (method of `End`, arguments), an answer (is an error, value). Waiting,
a process lets its connector serve the other end, often while that moves something: a transport may
need us for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from kvxfer.errors import KvxferError

if TYPE_CHECKING:
    from kvxfer.bench.transfer_end import End

IDLE_POLL_S = 0.002
SERVE_POLL_S = {"cpu": 100e-6}
"""While the other end moves something: on the host others need the core more than we do."""


def serve_process(pipe: Connection, role: str, device: str, environment: Mapping[str, str]) -> None:
    """A process's main: until the parent closes its end of `pipe`, however that comes about."""
    os.environ.update(environment)  # before any transport is loaded
    from kvxfer.bench.transfer_end import End

    serve(pipe, role, device, End)


def serve(pipe: Connection, role: str, device: str, kind: type[End]) -> None:
    with ExitStack() as undo, suppress(BrokenPipeError):  # the parent has gone: so do we
        end: End | None = None
        wait_s = IDLE_POLL_S
        while (message := _receive(pipe, end, wait_s)) is not None:
            verb, arguments = message
            try:
                if end is None:
                    end = kind(role, device)
                    undo.callback(end.close)
                if verb == "serve":
                    wait_s = SERVE_POLL_S.get(device, 0) if arguments[0] else IDLE_POLL_S
                answer = _answer(end, verb, arguments)
            except KvxferError as error:
                pipe.send((True, str(error)))
            else:
                pipe.send((False, answer))


def _receive(
    pipe: Connection, end: End | None, wait_s: float
) -> tuple[str, tuple[Any, ...]] | None:
    """The next message, None when the parent has gone. An error of what is done meanwhile is the
    answer to it: it is told then, and the message dropped."""
    failure = ""
    while True:
        try:
            while not pipe.poll(wait_s):
                if end is not None and not failure:
                    end.serve_peer()
            message: tuple[str, tuple[Any, ...]] = pipe.recv()
        except (EOFError, OSError):
            return None
        except KvxferError as error:
            failure = str(error)
            continue
        if not failure:
            return message
        pipe.send((True, failure))
        failure = ""


def _answer(end: End, verb: str, arguments: tuple[Any, ...]) -> Any:
    if verb == "serve":
        return None
    return getattr(end, verb)(*arguments)
