"""A process with a connector over a shared file, for test_staged.py.

Prints one line of JSON, then serves its peers until its standard input ends. A line of input,
'revoke', makes it forget its region, and is answered by an empty line.
"""

from __future__ import annotations

import json
import mmap
import select
import sys
from pathlib import Path

import numpy as np

from kvxfer.transfer.connector import MemoryWindow, load_connector
from kvxfer.transfer.regions import Region


def main(path: str, connector_name: str, agent_name: str, pause_s: float = 0.0002) -> None:
    with Path(path).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)
    memory = np.frombuffer(shared, dtype=np.uint8)
    base = int(memory.ctypes.data)
    window = MemoryWindow(base, memory.nbytes, "cpu")
    connector = load_connector(connector_name)(agent_name, window)
    region = Region(0, memory.nbytes)
    connector.register([region])
    say(json.dumps({"base": base, "description": connector.describe([region]).hex()}))
    while True:
        connector.poll()
        if not select.select([0], [], [], pause_s)[0]:
            continue
        if sys.stdin.readline().strip() != "revoke":
            break
        connector.deregister([region])
        say("")
    connector.close()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
