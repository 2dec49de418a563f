"""A follower: the process of one rank but the first, `python -m kvxfer.worker.rank_process PLACE`.

It does what rank 0 says over its lines, and ends with them: when rank 0 closes them, or dies.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvxfer.errors import KvxferError, WireError, WorkerDied
from kvxfer.telemetry.logs import LogFormat, set_up_logging
from kvxfer.worker.process import end_with_parent
from kvxfer.worker.rank_wire import GREETING, Call, Line, Reply, decode, encode

if TYPE_CHECKING:
    from kvxfer.worker.rank_host import RankHost

logger = logging.getLogger(__name__)

REPLY_TIMEOUT_S = 60.0


class Place(msgspec.Struct, frozen=True):
    """The command line's one argument, as JSON."""

    rank: int
    size: int
    rendezvous: str
    device: str
    parent: int
    """Rank 0's process."""
    lines: dict[str, int]
    """The descriptor of each line's end, by name."""
    worker_id: str = ""
    log_format: LogFormat = "text"


def serve(line: Line, name: str, host: RankHost) -> None:
    """Greet, then answer the line's calls until its other end is closed."""
    reply = Reply(GREETING, msgspec.Raw(encode(None)))
    while True:
        try:
            line.send(reply, REPLY_TIMEOUT_S)
            call: Call = line.receive(Call, None)
        except WorkerDied:
            return
        reply = answer(call, name, host)


def answer(call: Call, name: str, host: RankHost) -> Reply:
    """Run the call on `host`. A KvxferError is the call's own failure, and becomes the reply."""
    from kvxfer.worker.rank_methods import METHODS

    try:
        method = METHODS.get(call.method)
        if method is None or method.line != name:
            raise WireError(f"no method {call.method} on line {name}")
        result = method.run(host, *decode(call.arguments, method.arguments))
        return Reply(call.number, msgspec.Raw(encode(result)))
    except KvxferError as error:
        return Reply(call.number, msgspec.Raw(encode(None)), type(error).__name__, str(error))


def main() -> None:
    place = msgspec.json.decode(sys.argv[1], type=Place)
    end_with_parent()
    if os.getppid() != place.parent:
        return  # it died before this process could ask to die with it
    prefix = f"rank {place.rank} of {place.size}"
    set_up_logging(prefix, place.worker_id, place.log_format)
    from kvxfer.model.tensor_parallel import TensorParallel
    from kvxfer.worker.rank_host import RankHost
    from kvxfer.worker.rank_methods import LineName

    tensor_parallel = TensorParallel(place.rank, place.size, Path(place.rendezvous))
    host = RankHost(tensor_parallel, place.device)
    lines = {name: Line(socket.socket(fileno=fd)) for name, fd in place.lines.items()}
    for name in set(LineName) - {LineName.MODEL}:
        threading.Thread(
            target=_run, args=(lines[name], name, host), name=name, daemon=True
        ).start()
    _run(lines[LineName.MODEL], LineName.MODEL, host)
    # Without waiting for the threads, or for what torch does at the end of an interpreter: the
    # memory of a transfer that is still at work ends with the process.
    logging.shutdown()
    os._exit(0)


def _run(line: Line, name: str, host: RankHost) -> None:
    """The whole life of one line's thread; a bug in it ends the process, which rank 0 notices."""
    try:
        host.enter_thread()
        serve(line, name, host)
    except Exception:
        logger.exception("line %s died", name)
        logging.shutdown()
        os._exit(1)


if __name__ == "__main__":
    main()
