"""The log of a process: text for people, or an object a line for machines."""

from __future__ import annotations

import json
import logging
import time
from typing import Literal

from kvxfer.telemetry.log_rate import LONGEST, BoundedLog, one_line

LogFormat = Literal["text", "json"]

LONGEST_REQUEST_ID = 200
"""Characters: a router's client may have chosen it."""


class JsonLines(logging.Formatter):
    """One JSON object a record: time (UTC, ISO 8601), level, role, worker_id, logger, message;
    request_id where the record has one (`about`), exception where it has that."""

    def __init__(self, role: str, worker_id: str) -> None:
        super().__init__()
        self.worker_id = worker_id
        self._names = {"role": role, "worker_id": worker_id}

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            **self._names,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            told["request_id"] = one_line(str(request_id)[:LONGEST_REQUEST_ID])
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)[-4 * LONGEST :]
        return json.dumps(told)


def set_up_logging(role: str, worker_id: str, log_format: LogFormat) -> None:
    """Log to stderr from now on, instead of wherever it was. Bounded: see `BoundedLog`."""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JsonLines(role, worker_id))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {role} %(levelname)s %(message)s"))
    handler.addFilter(BoundedLog())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def as_set_up() -> tuple[str, LogFormat]:
    """The worker_id and format of this process's log, for the processes that it starts."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonLines):
            return handler.formatter.worker_id, "json"
    return "", "text"


def about(request_id: str) -> dict[str, str]:
    """For `extra` of a line about a request."""
    return {"request_id": request_id}
