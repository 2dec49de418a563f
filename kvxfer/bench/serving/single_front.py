"""`python -m kvxfer.bench.serving.single_front`: the HTTP front before a single process."""

from __future__ import annotations

import json
import os
from pathlib import Path

from cyclopts import App

from kvxfer.serve.front import Front
from kvxfer.serve.http import make_app
from kvxfer.serve.metrics_route import metrics_route
from kvxfer.serve.router import Router
from kvxfer.serve.served import ServedModel
from kvxfer.serve.uvicorn_server import HttpServer, bind
from kvxfer.worker.process import end_with_parent

CONNECT_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 120.0
"""As `kvxfer serve` has it."""


def serve(*, model: Path, worker: str, ready_fd: int) -> int:
    """Until SIGTERM; the address goes to `ready_fd`, as that of every worker."""
    end_with_parent()
    served = ServedModel.load(model)
    router = Router(survives_loss=True, request_timeout_s=REQUEST_TIMEOUT_S)
    try:
        router.connect([worker], CONNECT_TIMEOUT_S)
        front = Front(router)
        listener = bind(port=0)
        host, port = listener.getsockname()
        app = make_app(front, served, routes=[metrics_route(router, front)])
        server = HttpServer(app, listener, on_shutdown=front.end)
        line = json.dumps({"event": "listening", "address": f"{host}:{port}"})
        os.write(ready_fd, line.encode() + b"\n")
        server.run()
    finally:
        router.close()
    return 0


if __name__ == "__main__":
    App(default_command=serve, result_action="return_value")()
