"""`python -m kvxfer.bench.serving.child ARGUMENTS`: `kvxfer serve`, which ends with its parent."""

from __future__ import annotations

import os
import sys

from kvxfer.worker.process import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # the kernel remembers it across exec
    os.execv(sys.executable, [sys.executable, "-P", "-m", "kvxfer.cli", "serve", *sys.argv[1:]])
