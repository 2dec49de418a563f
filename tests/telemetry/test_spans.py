"""Spans of one process: contexts, phases, and an exporter that must cost nothing."""

import itertools
import logging
import sys
import threading
import time

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.running import wait_until

from kvxfer.errors import UsageError
from kvxfer.telemetry.otel import OtlpSpans
from kvxfer.telemetry.spans import (
    MAX_TRACEPARENT_CHARS,
    NO_SPANS,
    check_endpoint,
    open_spans,
    valid_traceparent,
)

GOOD = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.mark.parametrize(
    "text",
    ["", GOOD + "0", GOOD[:-1], GOOD.upper(), "00-" + "0" * 32 + GOOD[35:], "x" * 55, GOOD + "\n",
     GOOD[:36] + "0" * 16 + "-01", "01" + GOOD[2:]],
)  # fmt: skip
def test_what_is_no_context_is_none(text):
    assert valid_traceparent(text) == ""
    assert NO_SPANS.begin("decode", text, "r").traceparent == ""


def test_who_makes_no_spans_hands_the_context_on():
    assert valid_traceparent(GOOD) == GOOD and len(GOOD) <= MAX_TRACEPARENT_CHARS
    span = NO_SPANS.begin("decode", GOOD, "r")
    span.phase("queue")
    span.end("stop")
    assert span.traceparent == GOOD


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def spans(exporter):
    made = OtlpSpans("http://unused", "decode", "decode-0", exporter)
    yield made
    made.close()


def exported(spans, exporter):
    spans._provider.force_flush(5000)
    return {span.name: span for span in exporter.get_finished_spans()}


def test_phases_are_below_the_request_one_after_the_other(spans, exporter):
    span = spans.begin("decode", GOOD, "r-1")
    for name in ("queue", "queue", "transfer", "decode"):
        span.phase(name, **({"kvxfer.lane": "nixl/push"} if name == "decode" else {}))
    span.end("length", **{"gen_ai.usage.completion_tokens": 4})
    span.end("error", "twice")
    found = exported(spans, exporter)
    request = found["decode.request"]
    assert f"{request.context.trace_id:032x}" == "a" * 32
    assert f"{request.parent.span_id:016x}" == "b" * 16
    assert span.traceparent == f"00-{'a' * 32}-{request.context.span_id:016x}-01"
    assert dict(request.attributes) == {
        "gen_ai.request.id": "r-1",
        "kvxfer.reason": "length",
        "gen_ai.usage.completion_tokens": 4,
    }
    assert request.status.is_unset
    assert request.resource.attributes["service.name"] == "kvxfer-decode"
    assert request.resource.attributes["service.instance.id"] == "decode-0"
    phases = [found[f"decode.{name}"] for name in ("queue", "transfer", "decode")]
    assert len(found) == 4
    for one, after in itertools.pairwise(phases):
        assert request.start_time <= one.start_time <= one.end_time <= after.start_time
    assert phases[-1].end_time <= request.end_time
    assert {one.parent.span_id for one in phases} == {request.context.span_id}
    assert dict(phases[1].attributes) == {"kvxfer.lane": "nixl/push"}


def test_an_error_is_the_spans_status(spans, exporter):
    span = spans.begin("prefill", "nonsense", "r" * 5000)
    span.end("error", "the peer is lost")
    (request,) = exported(spans, exporter).values()
    assert request.parent is None
    assert request.status.description == "the peer is lost"
    assert len(request.attributes["gen_ai.request.id"]) == 200


def test_a_trace_that_is_not_sampled_is_handed_on_and_not_sent(spans, exporter):
    span = spans.begin("decode", GOOD[:-1] + "0", "r")
    span.phase("queue")
    span.end("stop")
    assert span.traceparent.startswith(GOOD[:36]) and span.traceparent.endswith("-00")
    assert exported(spans, exporter) == {}


class Stuck(SpanExporter):
    def __init__(self):
        self.may_go_on = threading.Event()

    def export(self, spans):
        self.may_go_on.wait(30)
        return SpanExportResult.FAILURE


def test_a_collector_that_hangs_holds_up_neither_requests_nor_the_end(caplog):
    before, stuck = threading.active_count(), Stuck()
    spans = OtlpSpans("http://unused", "decode", "decode-0", stuck)
    began = time.monotonic()
    for _ in range(3000):  # more than the queue holds
        span = spans.begin("decode", "", "r")
        span.end("stop")
    assert time.monotonic() - began < 2.5
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        spans.close()
    assert time.monotonic() - began < 1.5
    assert "is lost" in caplog.text
    stuck.may_go_on.set()
    wait_until(lambda: threading.active_count() == before, 10, "the exporter's end")


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:4318", "ftp://h/x", "http://", "http://h:0", "http://h:99999", "http://[x"],
)
def test_what_is_no_url_is_refused_by_name(endpoint):
    with pytest.raises(UsageError, match=r"otlp_traces_endpoint: .*must be a URL"):
        check_endpoint(endpoint)


def test_a_password_is_refused_and_not_told():
    with pytest.raises(UsageError) as error:
        open_spans("http://me:hush@host/v1/traces", "decode", "d")
    assert "hush" not in str(error.value) and "OTEL_EXPORTER_OTLP_HEADERS" in str(error.value)


def test_without_the_extra_it_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [one for one in sys.modules if one.startswith("kvxfer.telemetry.otel")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [one for one in sys.modules if one.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError, match=r"needs opentelemetry.*: pip install 'kvxfer\[otel\]'"):
        check_endpoint("http://127.0.0.1:4318/v1/traces")
    check_endpoint("")
