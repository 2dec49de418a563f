"""A stand-in for a worker process: `python -m support.child_worker SCRIPT --ready-fd N`.

SCRIPT is a comma-separated list of what to do, one after the other.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time


def main() -> None:
    held = []
    script, fd = sys.argv[1], int(sys.argv[sys.argv.index("--ready-fd") + 1])

    def tell(**record: str) -> None:
        os.write(fd, (json.dumps(record) + "\n").encode())

    for step in script.split(","):
        name, _, value = step.partition("=")
        if name == "listen":
            tell(event="listening", address=value, worker_id="w")
        elif name == "step":
            tell(event="step", text=value)
        elif name == "ready":
            tell(event="ready")
        elif name == "failed":
            tell(event="failed", text=value)
        elif name == "torn":
            os.write(fd, b'{"event": "re')
            time.sleep(float(value))
            os.write(fd, b'ady"}\n')
        elif name == "print":
            print(value, flush=True)
        elif name == "sleep":
            time.sleep(float(value))
        elif name == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif name == "socket":
            held.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            held[-1].bind(value)
            held[-1].listen()
        elif name == "polite":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        elif name == "kill":
            os.kill(os.getpid(), int(value))
        elif name == "exit":
            sys.exit(int(value))
        else:
            raise ValueError(step)


if __name__ == "__main__":
    main()
