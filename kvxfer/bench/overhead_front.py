"""`python -m kvxfer.bench.overhead_front`: the HTTP front before workers without a model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

import kvxfer.model.tiny
from kvxfer.bench.overhead_client import NAME
from kvxfer.model.loader import inspect_model
from kvxfer.model.tokenizer import Tokenizer
from kvxfer.serve.front import Front
from kvxfer.serve.http import make_app
from kvxfer.serve.router import Router
from kvxfer.serve.served import Limits, ServedModel
from kvxfer.serve.uvicorn_server import HttpServer, bind

CONNECT_TIMEOUT_S = 60.0
MAX_MODEL_LEN = 2048


def serve(
    *,
    worker: Annotated[tuple[str, ...], Parameter(negative=())],
    max_concurrent_requests: int,
    ready_fd: int,
) -> int:
    """Until SIGTERM; the address goes to `ready_fd`, as that of every worker. Prompts are tokens of
    the bundled model's tokenizer."""
    directory = Path(kvxfer.model.tiny.__file__).parent
    tokenizer, info = Tokenizer.load(directory), inspect_model(directory)
    served = ServedModel(NAME, tokenizer, info, MAX_MODEL_LEN)
    router = Router(survives_loss=True, request_timeout_s=120.0)
    try:
        router.connect(worker, CONNECT_TIMEOUT_S)
        front = Front(router)
        listener = bind(port=0)
        host, port = listener.getsockname()
        limits = Limits(max_concurrent_requests=max_concurrent_requests)
        server = HttpServer(make_app(front, served, limits), listener, on_shutdown=front.end)
        line = json.dumps({"event": "listening", "address": f"{host}:{port}"})
        os.write(ready_fd, line.encode() + b"\n")
        server.run()
    finally:
        router.close()
    return 0


if __name__ == "__main__":
    App(default_command=serve, result_action="return_value")()
