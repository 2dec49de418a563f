"""How each of the two processes begins. Imports no torch: who starts one need not have it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing.connection import Connection


def serve_process(pipe: Connection, role: str, device: str, environment: Mapping[str, str]) -> None:
    """A process's main: until the parent closes its end of `pipe`, however that comes about."""
    os.environ.update(environment)  # before any transport is loaded
    from kvxfer.bench.connectors.end import ConnectorsEnd
    from kvxfer.bench.transfer_serve import serve

    serve(pipe, role, device, ConnectorsEnd)
