"""/health over two prefill and two decode workers: what goes through which pair, what is told."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from support.http_service import LIMITS, HttpService, served_model

from kvxfer.serve.front import Front
from kvxfer.serve.health import Probe
from kvxfer.serve.router import Router

TIMEOUT_S, CACHE_S = 1.5, 0.05
PAIRS = {(f"prefill-{p}", f"decode-{d}") for p in (0, 1) for d in (0, 1)}


@pytest.fixture(scope="module")
def shared() -> Iterator[HttpService]:
    limits = replace(LIMITS, health_timeout_s=TIMEOUT_S, health_cache_s=CACHE_S)
    with HttpService(limits, num_each=2) as service:
        yield service


def health(service: HttpService) -> tuple[int, Any]:
    """Not what an earlier probe found."""
    time.sleep(2 * CACHE_S)
    status, _, body = service.send("GET", "/health")
    return status, json.loads(body)


def pairs(told: Any, status: str = "ok") -> set[tuple[str, str]]:
    return {(one["prefill"], one["decode"]) for one in told["pairs"] if one["status"] == status}


def test_every_pair_is_probed_with_a_transfer_and_named(service: HttpService) -> None:
    code, told = health(service)
    assert (code, told["status"], told["num_not_probed"]) == (200, "ok", 0)
    assert pairs(told) == PAIRS
    assert len(told["pairs"]) == 4
    assert all(one["transfer_bytes"] > 0 for one in told["pairs"]), "KV travelled"
    assert sum(one["seconds"] for one in told["pairs"]) <= told["seconds"] < TIMEOUT_S


def test_a_pair_that_does_not_get_through_is_named_and_time_is_bounded(
    service: HttpService,
) -> None:
    """What it holds up is not begun any more, and counted."""
    worker = service.cluster.workers[3]
    assert worker.options.worker_id == "decode-1"
    worker.runner.hold()
    service.cluster.workers[2].runner.hold()
    began_s = time.monotonic()
    try:
        code, told = health(service)
    finally:
        for one in service.cluster.workers:
            one.runner.release()
    assert time.monotonic() - began_s < 4 * TIMEOUT_S
    assert (code, told["status"]) == (503, "error")
    (failed,) = pairs(told, "error")
    assert failed[0] == "prefill-1", "prefill makes the first token, decode the others"
    assert told["reason"].startswith("no answer within ")
    assert len(told["pairs"]) + told["num_not_probed"] == 4
    service.until_idle()
    assert health(service)[0] == 200


def test_no_two_probes_are_under_way_however_many_ask(
    service: HttpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, num_submitted = 0, 0
    submit: Callable[..., Any] = Front.submit

    def counted(front: Front, *arguments: Any, **more: Any) -> Any:
        nonlocal most, num_submitted
        found = submit(front, *arguments, **more)
        most, num_submitted = max(most, front.num_in_flight), num_submitted + 1
        return found

    monkeypatch.setattr(Front, "submit", counted)
    time.sleep(2 * CACHE_S)
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda _: service.send("GET", "/health")[2], range(8)))
    assert most == 1
    assert len(set(told)) * 4 == num_submitted
    assert len(set(told)) < 8, "those who ask meanwhile share one"


@pytest.mark.slow
def test_pairs_that_time_does_not_allow_are_next(service: HttpService) -> None:
    """Each is so slow that half of the time is over after two of four."""
    slow = service.cluster.workers[0], service.cluster.workers[2]
    release = threading.Event()

    def pace() -> None:
        while not release.wait(TIMEOUT_S / 4):
            for one in slow:
                one.runner.release()
                one.runner.hold()

    for one in slow:
        one.runner.hold()
    thread = threading.Thread(target=pace)
    thread.start()
    try:
        seen: list[set[tuple[str, str]]] = []
        for _ in range(4):
            code, told = health(service)
            assert (code, told["status"]) == (200, "ok"), told
            assert len(told["pairs"]) + told["num_not_probed"] == 4
            seen.append(pairs(told))
    finally:
        release.set()
        thread.join()
        for one in slow:
            one.runner.release()
    assert min(map(len, seen)) < 4, "not all of them each time"
    assert seen[0] | seen[1] == PAIRS, seen


def test_without_a_worker_it_says_what_is_missing() -> None:

    router = Router(survives_loss=True)
    try:
        probe = Probe(Front(router), served_model(), LIMITS)
        is_well, told = asyncio.run(probe.outcome())
    finally:
        router.close()
    assert (is_well, told["reason"]) == (False, "there is no decode worker")
    assert told["pairs"][0]["status"] == "error"
