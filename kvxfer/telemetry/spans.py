"""Traces of requests: spans that several processes make of one request.

| span            | by      | its parent              | phases, one after the other  |
| ---             | ---     | ---                     | ---                          |
| router.request  | router  | the client's, if it has | none; time to first token    |
|                 |         | one                     | is an attribute              |
| decode.request  | decode  | router.request          | queue, transfer, decode      |
| prefill.request | prefill | decode.request          | queue, compute, hand_over    |

The context travels as a W3C `traceparent`. What is no such text counts as none. Nothing here
blocks, raises or keeps a request: whoever makes no spans hands on the context that came.
"""

from __future__ import annotations

import re
from typing import Protocol
from urllib.parse import urlsplit

from kvxfer.errors import UsageError

MAX_TRACEPARENT_CHARS = 64
"""It has 55 in the version that there is."""
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

Value = str | int | float


def valid_traceparent(text: str) -> str:
    """`text`, or '' for what is none."""
    return text if _TRACEPARENT.fullmatch(text) else ""


class Span(Protocol):
    """One process's part of a request. One thread; whoever began it ends it."""

    @property
    def traceparent(self) -> str:
        """For those who go on with the request, '' where there is no trace."""

    def phase(self, name: str, **attributes: Value) -> None:
        """The phase before ends, `name` begins; `attributes` are of the one that ended. The same
        name again changes nothing."""

    def end(self, reason: str, error: str = "", **attributes: Value) -> None:
        """Idempotent. `reason`: how the request ended."""


class Spans(Protocol):
    """What a process makes spans with."""

    def begin(self, name: str, traceparent: str, request_id: str, **attributes: Value) -> Span:
        """A span below `traceparent`, or the first of a trace."""

    def close(self) -> None:
        """Hand out what waits, within a deadline."""


class _NoSpan:
    """Hands the context on."""

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def phase(self, name: str, **attributes: Value) -> None: ...

    def end(self, reason: str, error: str = "", **attributes: Value) -> None: ...


class _NoSpans:
    def begin(self, name: str, traceparent: str, request_id: str, **attributes: Value) -> Span:
        return _NoSpan(valid_traceparent(traceparent)) if traceparent else NO_SPAN

    def close(self) -> None: ...


NO_SPAN: Span = _NoSpan("")
NO_SPANS: Spans = _NoSpans()


def check_endpoint(endpoint: str) -> None:
    """Raises UsageError for what is no URL to send traces to, or without what sends them."""
    if not endpoint:
        return
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        reason = "must be a URL such as http://127.0.0.1:4318/v1/traces"
        raise UsageError("otlp_traces_endpoint", endpoint, reason)
    if parts.username or parts.password:
        reason = "must not hold a password: OTEL_EXPORTER_OTLP_HEADERS is for that"
        raise UsageError("otlp_traces_endpoint", f"{parts.scheme}://...", reason)
    try:
        import kvxfer.telemetry.otel  # noqa: F401
    except ModuleNotFoundError as error:
        reason = f"needs {error.name}: pip install 'kvxfer[otel]'"
        raise UsageError("otlp_traces_endpoint", endpoint, reason) from error


def open_spans(endpoint: str, role: str, worker_id: str) -> Spans:
    """Spans that are sent to `endpoint`; '' makes none. Raises UsageError as `check_endpoint`."""
    check_endpoint(endpoint)
    if not endpoint:
        return NO_SPANS
    from kvxfer.telemetry.otel import OtlpSpans

    return OtlpSpans(endpoint, role, worker_id)
