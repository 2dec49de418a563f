"""`python -m kvxfer.bench.vllm.child PROGRAM ARGUMENTS`: run it; it ends with its parent."""

from __future__ import annotations

import os
import sys

from kvxfer.worker.process import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # the kernel remembers it across exec
    os.execv(sys.argv[1], sys.argv[1:])
