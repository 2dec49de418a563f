"""A router behind HTTP, in this thread, until it is told to end; with workers of its own or not.

| state    | what happens                                     | leaves by                          |
| ---      | ---                                              | ---                                |
| STARTING | HTTP answers; there may be no workers yet        | all of ours, or one of each role,  |
|          |                                                  | are ready → SERVING; ours are late |
|          |                                                  | → an error                         |
| SERVING  | it serves                                        | SIGTERM → DRAINING                 |
| DRAINING | new requests are refused, those under way end    | none is left, shutdown_timeout_s   |
|          |                                                  | is over, or a signal → the end     |

SIGINT ends each of them at once: what is under way ends as an error.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from enum import Enum

from kvxfer.errors import DeadlineExceeded
from kvxfer.launch.supervisor import Keeper, WorkerState
from kvxfer.serve.admin import Scale, admin_routes
from kvxfer.serve.dashboard.events import Watch
from kvxfer.serve.dashboard.routes import dashboard_routes
from kvxfer.serve.front import Front
from kvxfer.serve.http import make_app
from kvxfer.serve.metrics_route import metrics_route
from kvxfer.serve.options import HttpOptions, is_open_to_others
from kvxfer.serve.overview import Overview, overview
from kvxfer.serve.router import Router
from kvxfer.serve.served import Limits, ServedModel
from kvxfer.serve.uvicorn_server import HttpServer
from kvxfer.telemetry.spans import NO_SPANS, Spans

logger = logging.getLogger(__name__)


class ServiceState(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class Service:
    """The router stays its owner's, the supervisor too; `listener` is closed at the end."""

    def __init__(
        self,
        options: HttpOptions,
        served: ServedModel,
        router: Router,
        listener: socket.socket,
        *,
        spans: Spans = NO_SPANS,
        supervisor: Keeper | None = None,
        scale: Scale | None = None,
        start_timeout_s: float = 0.0,
        announce: Callable[[str], None] = print,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """`announce` is called with each line for a person, `on_end` as soon as the end begins,
        `scale` when an administrator asks for other numbers of workers."""
        self.state = ServiceState.STARTING
        self._options = options
        self._served = served
        self._router = router
        self._supervisor = supervisor
        self._announce = announce
        self._on_end = on_end
        self._front = Front(router)
        self._front.spans = spans
        self._url = url_of(listener)
        self._start_deadline_s = time.monotonic() + start_timeout_s if supervisor else 0.0
        self._drain_deadline_s = 0.0
        self._takes_signals = False
        limits = Limits(max_concurrent_requests=options.max_concurrent_requests)
        self._watch = Watch(router)
        routes = [
            *admin_routes(
                router, self.describe, api_keys=options.api_key,
                may_change=options.enable_admin, scale=scale,
            ),
            *dashboard_routes(router, self._watch),
            metrics_route(router, self._front),
        ]  # fmt: skip
        app = make_app(self._front, served, limits, api_keys=options.api_key, routes=routes)
        self._server = HttpServer(app, listener, tick=self._tick, on_shutdown=self._end)

    def run(self) -> None:
        """Serve until a signal. Raises what else ends it: WorkerDied of ours at the start."""
        if is_open_to_others(self._options):
            logger.warning(
                "HTTP on %s is open to all who reach this host: give --api-key", self._options.host
            )
        self._server.run()

    def describe(self) -> Overview:
        """What /status tells."""
        return overview(
            self._served.name,
            self._front.num_in_flight,
            self.state is ServiceState.DRAINING,
            self._router.backends,
            self._supervisor.workers if self._supervisor else (),
        )

    # --- in the loop --------------------------------------------------------------------------

    def _tick(self) -> None:
        if not self._takes_signals:  # after the server has taken them
            self._takes_signals = True
            signal.signal(signal.SIGTERM, lambda *_: self._drain())
        now_s = time.monotonic()
        if self._supervisor is not None:
            self._supervisor.poll(now_s)
        if self.state is ServiceState.STARTING:
            self._look_whether_ready(now_s)
        elif self.state is ServiceState.DRAINING and self._is_drained(now_s):
            self._server.stop()

    def _look_whether_ready(self, now_s: float) -> None:
        counts = [len(self._front.ready(role)) for role in ("prefill", "decode")]
        own = self._supervisor
        if own is None:
            is_ready = min(counts) > 0
        else:
            is_ready = own.was_ready and sum(counts) == len(own.workers)
            if not is_ready and now_s > self._start_deadline_s:
                late = [one.plan.name for one in own.workers if one.state is not WorkerState.READY]
                names = ", ".join(late) or "the router's greeting"
                raise DeadlineExceeded(f"start: {names}: not ready in time (start_timeout_s)")
        if is_ready:
            self.state = ServiceState.SERVING
            prefill, decode = counts
            what = f"{self._served.name} with {prefill} prefill and {decode} decode workers"
            self._announce(f"ready: {self._url} serves {what}; live page: {self._url}/ui; try:")
            self._announce(curl_example(self._url, self._served.name, bool(self._options.api_key)))

    def _drain(self) -> None:
        """A signal's handler, in the main thread, which is the loop's."""
        if self.state is ServiceState.DRAINING:
            self._server.stop()
            return
        self.state = ServiceState.DRAINING
        self._drain_deadline_s = time.monotonic() + self._options.shutdown_timeout_s
        self._front.is_closing = True
        left, most_s = self._front.num_in_flight, self._options.shutdown_timeout_s
        logger.info("SIGTERM: %d requests under way, waited for at most %g s", left, most_s)

    def _is_drained(self, now_s: float) -> bool:
        return self._front.num_in_flight == 0 or now_s >= self._drain_deadline_s

    def _end(self) -> None:
        self._front.end()
        self._watch.close()  # open pages would hold up the end
        self._on_end()


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def curl_example(url: str, model: str, has_key: bool) -> str:
    body = json.dumps({"model": model, "prompt": "To be, or not to be", "max_tokens": 32})
    words: Sequence[str] = [
        f"curl {url}/v1/completions",
        "-H 'Content-Type: application/json'",
        *(["-H 'Authorization: Bearer YOUR_KEY'"] if has_key else []),
        "-d '" + body.replace("'", "'\\''") + "'",
    ]
    return " ".join(words)
