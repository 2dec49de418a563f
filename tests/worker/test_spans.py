"""One request's spans, made by a prefill and a decode worker."""

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvxfer.telemetry.otel import OtlpSpans

PHASES = {"decode": ("queue", "transfer", "decode"), "prefill": ("queue", "compute", "hand_over")}
PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def pair(cluster, exporter):
    """Makes a prefill and a decode worker that make spans."""
    made = {}

    def make(lane):
        for role in PHASES:
            made[role] = OtlpSpans("http://unused", role, f"{role}-0", exporter)
        tell = {role: {"spans": one} for role, one in made.items()}
        return cluster.pair(lane, **tell)

    yield make
    for one in made.values():
        one.close()
        one.close()


def spans_of(pair, exporter, *workers):
    for worker in workers:
        worker.parts.spans._provider.force_flush(5000)
    return exporter.get_finished_spans()


@pytest.mark.parametrize("lane", ["push", "pull"])
def test_one_trace_from_the_router_to_prefill(cluster, pair, exporter, lane):
    prefill, decode = pair(lane)
    sent = cluster.send(decode, num_tokens=12, max_new_tokens=3, traceparent=PARENT)
    cluster.finish(sent)
    sent.check_equal()
    cluster.until_idle()
    found = spans_of(pair, exporter, prefill, decode)
    assert {f"{span.context.trace_id:032x}" for span in found} == {"a" * 32}
    named = {span.name: span for span in found}
    parents = {name: f"{span.parent.span_id:016x}" for name, span in named.items()}
    ids = {name: f"{span.context.span_id:016x}" for name, span in named.items()}
    expected = {"decode.request": "b" * 16, "prefill.request": ids["decode.request"]}
    for role, phases in PHASES.items():
        expected |= {f"{role}.{phase}": ids[f"{role}.request"] for phase in phases}
    assert parents == expected and len(found) == len(expected)
    request = named["decode.request"].attributes
    assert request["kvxfer.reason"] == "length"
    assert request["gen_ai.usage.completion_tokens"] == 3
    moved = sent.finished.transfer.num_bytes
    assert named["decode.transfer"].attributes["kvxfer.transfer.bytes"] == moved > 0
    assert named["decode.transfer"].attributes["kvxfer.lane"] == f"loopback/{lane}"
    at_prefill = named["prefill.request"].attributes
    assert at_prefill["gen_ai.usage.prompt_tokens"] == 12
    assert at_prefill.get("kvxfer.transfer.bytes", 0) == (moved if lane == "push" else 0)


def test_a_request_that_fails_says_so(cluster, pair, exporter):
    prefill, decode = pair("pull")
    decode.connector.refuse.add("submit")
    sent = cluster.send(decode)
    cluster.finish(sent)
    assert sent.finished.reason == "error"
    decode.connector.refuse.clear()
    cluster.until_idle()
    named = {span.name: span for span in spans_of(pair, exporter, prefill, decode)}
    assert "submit is refused" in named["decode.request"].status.description
    assert named["prefill.request"].attributes["kvxfer.reason"] == "cancelled"
    assert named["prefill.request"].parent.span_id == named["decode.request"].context.span_id
