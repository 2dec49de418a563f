"""Spans by OpenTelemetry's SDK, sent by OTLP over HTTP. Imported where traces are asked for only.

Facts (SDK 1.45): a BatchSpanProcessor sends from a thread of its own, drops what its queue has no
room for, and has no deadline of its own at shutdown that is short enough for us.
"""

from __future__ import annotations

import logging
import threading

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvxfer.telemetry.spans import Span, Value, valid_traceparent

logger = logging.getLogger(__name__)

EXPORT_TIMEOUT_S = 5.0
EXPORT_PAUSE_MS = 1000
MAX_QUEUED = 2048
CLOSE_TIMEOUT_S = 0.5
"""A worker is gone within 2 s of Ctrl-C, wherever its traces go."""
LONGEST_ID = 200
"""Characters of a request's id: a client may have chosen it."""

_propagator = TraceContextTextMapPropagator()


class OtlpSpans:
    """See `kvxfer.telemetry.spans.Spans`."""

    def __init__(
        self, endpoint: str, role: str, worker_id: str, exporter: SpanExporter | None = None
    ) -> None:
        about = {
            "service.name": f"kvxfer-{role}",
            "service.instance.id": worker_id,
        }
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        exporter = exporter or OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        processor = BatchSpanProcessor(
            exporter, max_queue_size=MAX_QUEUED, schedule_delay_millis=EXPORT_PAUSE_MS
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvxfer")

    def begin(self, name: str, traceparent: str, request_id: str, **attributes: Value) -> Span:
        parent = valid_traceparent(traceparent)
        context = _propagator.extract({"traceparent": parent} if parent else {}, Context())
        told = {"gen_ai.request.id": request_id[:LONGEST_ID], **attributes}
        span = self._tracer.start_span(f"{name}.request", context, attributes=told)
        return _OtlpSpan(self._tracer, name, span)

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        if closing.is_alive():
            logger.warning("traces: what was not sent within %g s is lost", CLOSE_TIMEOUT_S)


class _OtlpSpan:
    def __init__(self, tracer: Tracer, name: str, span: OtelSpan) -> None:
        self._tracer = tracer
        self._name = name
        self._span = span
        self._context = set_span_in_context(span, Context())
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, self._context)
        self.traceparent = carrier.get("traceparent", "")
        self._phase: OtelSpan | None = None
        self._phase_name = ""

    def phase(self, name: str, **attributes: Value) -> None:
        if name == self._phase_name or not self._span.is_recording():
            return
        self._end_phase(attributes)
        self._phase_name = name
        self._phase = self._tracer.start_span(f"{self._name}.{name}", self._context)

    def end(self, reason: str, error: str = "", **attributes: Value) -> None:
        if not self._span.is_recording():
            return
        self._end_phase({})
        self._span.set_attributes({"kvxfer.reason": reason, **attributes})
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()

    def _end_phase(self, attributes: dict[str, Value]) -> None:
        if self._phase is not None:
            self._phase.set_attributes(attributes)
            self._phase.end()
            self._phase = None
