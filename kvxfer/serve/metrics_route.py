"""GET /metrics at the router: its own metrics and those of every worker, one exposition."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvxfer.control.facts import WorkerFacts
from kvxfer.serve.front import Front
from kvxfer.serve.router import Router
from kvxfer.telemetry.metrics import CONTENT_TYPE, Samples

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 2.0
"""For the workers; Prometheus gives up after 10 s unless told."""
ROUTER = {"worker": "router", "role": "router"}
"""Labels of the router's own samples."""


def metrics_route(router: Router, front: Front) -> Route:
    """For `make_app`."""
    asked: asyncio.Task[str] | None = None

    async def answer(request: Request) -> Response:
        """Those who ask at the same time are told the same."""
        nonlocal asked
        if asked is None or asked.done():
            asked = asyncio.create_task(_gather(router, front))
        text = await asyncio.shield(asked)
        return Response(text, media_type=CONTENT_TYPE)

    return Route("/metrics", answer)


async def _gather(router: Router, front: Front) -> str:
    is_done = asyncio.Event()
    scrape = router.ask_metrics()
    scrape.on_done = is_done.set
    front.sent()
    if scrape.missing:
        try:
            await asyncio.wait_for(is_done.wait(), SCRAPE_TIMEOUT_S)
        except TimeoutError:
            scrape.give_up()
    merged, failed = await asyncio.to_thread(merge, scrape.texts)
    for name in failed:
        logger.warning("worker %s: its metrics cannot be read", name)
    for _ in range(scrape.num_failed + len(failed)):
        front.metrics.scrape_failed()
    merged.add_text(front.metrics.gather().text(), **ROUTER)
    return merged.text()


def merge(parts: Sequence[tuple[WorkerFacts, str]]) -> tuple[Samples, list[str]]:
    """All samples, each with its worker and role; and whose text was no exposition. Pure."""
    merged, failed = Samples(), []
    for facts, text in parts:
        try:
            merged.add_text(text, worker=facts.worker_id, role=facts.role)
        except ValueError:
            failed.append(facts.worker_id)
    return merged, failed
