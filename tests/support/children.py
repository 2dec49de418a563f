"""Code that may fault, run in a forked child."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Callable

TIMEOUT_S = 30.0


def run_in_child(body: Callable[[], object]) -> int:
    """0 if `body()` returned, 1 if it raised, -N if signal N ended the child."""
    pid = os.fork()
    if not pid:
        faulthandler.disable()  # a fault may be what the test is about
        try:
            body()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise TimeoutError("the child outlived its deadline")
