"""A worker that is told to stop while it starts does."""

from __future__ import annotations

import os
import signal

import pytest

from kvxfer.worker.process import Announcer, StopRequested, StopSignal, handle_signals


class Dying:
    """Collected at a bad time: a signal comes in the midst of it."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("at", ["step", "ready"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_python_dropped_is_heard_at_the_next_step(at: str) -> None:
    reads, writes = os.pipe()
    try:
        stop = StopSignal()
        announcer = Announcer(writes, stop.check)
        with handle_signals(stop.request):
            announcer.step("loading")
            Dying()  # nothing is raised here
            with pytest.raises(StopRequested):
                announcer.step("more") if at == "step" else announcer.ready()
        assert os.read(reads, 1000) == b'{"event": "step", "text": "loading"}\n'
    finally:
        os.close(reads)
        os.close(writes)


def test_a_stop_is_raised_where_it_comes() -> None:
    with handle_signals(StopSignal().request), pytest.raises(StopRequested):
        os.kill(os.getpid(), signal.SIGINT)
