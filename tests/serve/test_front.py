"""The router within an event loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from support.cluster import Cluster
from support.http_service import MODEL, HttpService
from support.running import wait_until

from kvxfer.control.router_messages import Sampling
from kvxfer.errors import ControlError
from kvxfer.serve import front as front_module
from kvxfer.serve.front import Front
from kvxfer.serve.router import Router


def test_a_router_that_raises_leaves_nobody_waiting() -> None:
    with HttpService() as service:
        service.hold()
        with service.socket(service.post_bytes(prompt="x")) as waiting:
            wait_until(lambda: service.front.num_in_flight == 1, 5, "one in flight")

            def poll(timeout_s: float) -> None:
                raise ControlError("its socket broke")

            service.router.poll = poll  # type: ignore[method-assign]
            answer = b""
            while not answer.endswith(b"}}"):
                answer += waiting.recv(1000)
            assert answer.startswith(b"HTTP/1.1 503"), answer
            assert b"the router stopped: its socket broke" in answer
        status, body = service.ask(model=MODEL, prompt="x")
        assert (status, body["error"]["type"]) == (503, "service_unavailable_error")
        assert service.send("GET", "/ready")[0] == 503
        assert isinstance(service.front.failure, ControlError)


def test_messages_wake_it_without_its_timer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edges that were missed would be found by the timer alone, which comes too late here."""
    monkeypatch.setattr(front_module, "TICK_S", 0.4)
    _, decode = cluster.pair()
    router = Router(survives_loss=True)
    is_over = threading.Event()

    def turn() -> None:
        while not is_over.is_set():
            cluster.turn()
            time.sleep(0.0002)

    turner = threading.Thread(target=turn)
    turner.start()

    async def ask() -> float:
        front = Front(router)
        front.start()
        began = time.monotonic()
        for at in range(30):
            wake = asyncio.Event()
            stream = front.submit(
                [at + 1, 2, 3], 3, wake, sampling=Sampling(), stop_token_ids=()
            )  # fmt: skip
            async with asyncio.timeout(10):
                while stream.completion.finished is None:
                    await wake.wait()
                    wake.clear()
            assert stream.completion.finished.error == ""
            front.release(stream)
        took_s = time.monotonic() - began
        front.close()
        return took_s

    try:
        router.connect([decode.address], 10)
        took_s = asyncio.run(ask())
    finally:
        is_over.set()
        turner.join(10)
        router.close()
    assert took_s < 30 * 0.4 / 3, "most did not wait for the timer"
