"""A worker's metrics over HTTP, for who scrapes workers directly, and what supervisors probe.

| path     | what                                                                          |
| ---      | ---                                                                           |
| /metrics | Prometheus' text                                                              |
| /health  | 200 while the control thread answers                                          |
| /ready   | 200 while it takes new requests; 503 with the reason while it drains or sleeps |

Before the worker has started nobody is answered. The threads here hold nothing of the worker's:
they ask its control thread for the text, and wait for it no longer than ANSWER_TIMEOUT_S.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvxfer.errors import UsageError
from kvxfer.telemetry.metrics import CONTENT_TYPE
from kvxfer.worker.mailbox import Mailbox
from kvxfer.worker.work_thread import Report

logger = logging.getLogger(__name__)

PATHS = ("/metrics", "/health", "/ready")
ANSWER_TIMEOUT_S = 5.0
CONNECTION_TIMEOUT_S = 10.0
"""Of a connection, from its first byte to its last: slow clients must not pile up."""
MAX_CONNECTIONS = 8
POLL_S = 0.1
STOP_TIMEOUT_S = 0.5


class MetricsServer:
    """Bound from its start; answers between `start` and `close`. `host` may be a name."""

    def __init__(self, host: str, port: int) -> None:
        """Raises UsageError where that cannot be bound."""
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._server = _Server(family, address)
        except (OSError, UnicodeError) as error:
            raise UsageError("metrics_port", f"{host}:{port}", f"cannot bind: {error}") from error
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        address: tuple[str, int] = self._server.socket.getsockname()
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        return f"http://{host}:{address[1]}/metrics"

    def start(
        self,
        reports: Mailbox[Report],
        text: Callable[[], str],
        unready: Callable[[], str] = lambda: "",
    ) -> None:
        """Answer with `text`, and with why nothing new is taken or '': the thread that drains
        `reports` calls both."""
        pages = {"/metrics": text, "/health": lambda: "", "/ready": unready}

        def ask(path: str) -> str | None:
            told: queue.Queue[str] = queue.Queue()  # not a SimpleQueue: `worker.jobs`
            reports.put(lambda: told.put(pages[path]()))
            try:
                return told.get(timeout=ANSWER_TIMEOUT_S)
            except queue.Empty:
                return None

        self._server.ask = ask
        run = lambda: self._server.serve_forever(POLL_S)  # noqa: E731
        self._thread = threading.Thread(target=run, name="metrics", daemon=True)
        self._thread.start()
        logger.info("metrics at %s", self.url)

    def close(self) -> None:
        """Idempotent. Connections that are open are cut."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join(STOP_TIMEOUT_S)
            self._thread = None
        self._server.server_close()
        self._server.cut(older_than_s=0.0)
        self._server.wait(STOP_TIMEOUT_S)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, family: int, address: Any) -> None:
        self.address_family = family
        self.ask: Callable[[str], str | None] = lambda path: None
        self._lock = threading.Lock()
        self._open: dict[socket.socket, tuple[float, threading.Thread | None]] = {}
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """As the base's, but for a look-up of this host's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                return False
            self._open[request] = time.monotonic(), None
            return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._lock:
            began_s, _ = self._open[request]
            self._open[request] = began_s, threading.current_thread()
        super().process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        self.cut(CONNECTION_TIMEOUT_S)

    def cut(self, older_than_s: float) -> None:
        """Have whoever reads from, or writes to, such an old connection fail."""
        with self._lock:
            for connection, (began_s, _) in self._open.items():
                if time.monotonic() - began_s >= older_than_s:
                    try:
                        connection.shutdown(socket.SHUT_RDWR)
                    except OSError as error:  # its client has left
                        logger.debug("metrics: %s", error)

    def wait(self, timeout_s: float) -> None:
        """Until nobody is answered any more."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            threads = [thread for _, thread in self._open.values() if thread is not None]
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("metrics: a connection broke", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "kvxfer"
    sys_version = ""
    timeout = CONNECTION_TIMEOUT_S

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path not in PATHS:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        text = self.server.ask(path)
        if text is None:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "The worker did not answer in time")
        elif path == "/metrics":
            self._answer(HTTPStatus.OK, text, CONTENT_TYPE)
        else:
            status = HTTPStatus.SERVICE_UNAVAILABLE if text else HTTPStatus.OK
            self._answer(status, f"{text or 'ok'}\n", "text/plain; charset=utf-8")

    def _answer(self, status: HTTPStatus, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """What clients ask is no news."""
