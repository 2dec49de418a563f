"""A process with a NIXL connector over a shared file, for test_nixl.py.

Prints one line of JSON, then serves its peer until its standard input ends.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import sys
from pathlib import Path

import numpy as np

from connectors.nixl import NixlConnector
from kvxfer.transfer.connector import MemoryWindow
from kvxfer.transfer.regions import Region


def main(path: str, agent_name: str, offset: int, size: int) -> None:
    with Path(path).open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)
    memory = np.frombuffer(shared, dtype=np.uint8)
    base = int(memory.ctypes.data)
    connector = NixlConnector(agent_name, MemoryWindow(base, memory.nbytes, "cpu"))
    region = Region(offset, size)
    connector.register([region])
    ready = {
        "base": base,
        "description": connector.describe([region]).hex(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("UCX_", "NIXL_"))},
    }
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    while not select.select([0], [], [], 0.0005)[0]:
        connector.poll()
    connector.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
