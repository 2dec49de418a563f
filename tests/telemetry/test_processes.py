"""Workers as processes, started with everything that tells of them."""

import contextlib
import http.server
import json
import subprocess
import sys
import threading
import urllib.request

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.commands import ROOT, TINY_MODEL, run
from support.exposition import value
from support.running import wait_until
from support.service_processes import free_port

from kvxfer.control.telemetry_messages import Metrics
from kvxfer.serve.router import Router
from kvxfer.telemetry.spans import NO_SPANS, open_spans

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_nothing_behind")]

START_TIMEOUT_S = 60.0


class Collector(http.server.ThreadingHTTPServer):
    """What is sent to it by OTLP over HTTP."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Receiver)
        self.spans = []
        self.thread = threading.Thread(target=lambda: self.serve_forever(0.05))

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.thread.join(5)
        self.server_close()


class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            raise AssertionError("not asked for")
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.server.spans += [(about["service.name"], span) for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_): ...


@contextlib.contextmanager
def started(role, log, *options):
    """`python -m ROLE.null`, once it is ready; SIGTERM ends it with code 0."""
    command = [sys.executable, "-m", f"{role}.null", "--model", "pattern", "--worker-id",
               f"{role}-0", "--log-format", "json", "--kv-cache-memory-bytes", str(32 << 20),
               *options]  # fmt: skip
    with log.open("w") as target:
        process = subprocess.Popen(command, cwd=ROOT, stdout=target, stderr=target)
    try:
        wait_until(lambda: '"message": "ready"' in log.read_text(), START_TIMEOUT_S, role)
        yield process
        process.terminate()
        assert process.wait(5) == 0, log.read_text()
    finally:
        process.kill()
        process.wait(5)


def lines_of(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_request_is_seen_in_traces_metrics_and_logs(tmp_path):
    addresses = {role: f"tcp://127.0.0.1:{free_port()}" for role in ("prefill", "decode")}
    ports = {role: free_port() for role in addresses}
    logs = {role: tmp_path / role for role in addresses}
    with contextlib.ExitStack() as stack:
        collector = stack.enter_context(Collector())

        def start(role, *options):
            told = ["--listen", addresses[role], "--metrics-port", str(ports[role])]
            told += ["--otlp-traces-endpoint", collector.url, "--block-size", "16"]
            stack.enter_context(started(role, logs[role], *told, *options))

        start("prefill")
        start("decode", "--prefill", addresses["prefill"])
        spans = open_spans(collector.url, "router", "router")
        assert spans is not NO_SPANS
        stack.callback(spans.close)
        router = Router()
        stack.callback(router.close)
        (backend,) = router.connect([addresses["decode"]], START_TIMEOUT_S)
        wait_until(lambda: router.status(backend).values["peers"] == 1, 20, "the pair")
        span = spans.begin("router", "", "seen")
        good = router.submit(
            backend, list(range(40)), 4, request_id="seen", traceparent=span.traceparent
        )
        bad = router.submit(backend, [-1], 4, request_id="not-good")
        while good.finished is None or bad.finished is None:
            router.poll(0.05)
        span.end(good.finished.reason)
        assert (good.finished.reason, bad.finished.reason) == ("length", "error")

        check_metrics(router, ports, good)
        wait_until(lambda: len(collector.spans) >= 9, 20, "all spans")
        check_spans(collector.spans)
    for role, log in logs.items():
        for line in lines_of(log):
            assert line["role"] == role and line["worker_id"] == f"{role}-0", line
            assert line["level"] != "ERROR"
    about = [line for line in lines_of(logs["decode"]) if line.get("request_id") == "not-good"]
    assert [line["level"] for line in about] == ["WARNING"]


def check_metrics(router, ports, good):
    texts = {}
    for role, port in ports.items():
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            texts[role] = answer.read().decode()
    labels = [(role, {"connector": c, "direction": d}) for role in texts
              for c in ("peer", "nixl") for d in ("push", "pull")]  # fmt: skip
    name, moved = "kvxfer_transfer_bytes_total", 0
    for role, label in labels:
        with contextlib.suppress(KeyError):  # a lane that nothing took
            moved += value(texts[role], name, **label)
    assert moved >= good.finished.transfer.num_bytes > 0
    assert value(texts["decode"], "kvxfer_requests_total", reason="length") == 1
    assert value(texts["decode"], "kvxfer_requests_total", reason="error") == 1
    assert value(texts["prefill"], "kvxfer_requests_total", reason="done") == 1
    answers, took = [], router._receive
    router._receive = lambda letter: (answers.append(letter.message), took(letter))
    scrape = router.ask_metrics()
    while scrape.missing:
        router.poll(0.05)
    assert any(isinstance(one, Metrics) for one in answers)


def check_spans(found):
    """All of the good request's are of one trace, each below the one that it belongs to."""
    by_name = {span.name: (service, span) for service, span in found}
    trace_id = by_name["router.request"][1].trace_id
    traced = {span.name: (service, span) for service, span in found if span.trace_id == trace_id}
    phases = {
        "decode": ("queue", "transfer", "decode"),
        "prefill": ("queue", "compute", "hand_over"),
    }
    parents = {"router.request": "", "decode.request": "router.request",
               "prefill.request": "decode.request"}  # fmt: skip
    for role, names in phases.items():
        parents |= {f"{role}.{name}": f"{role}.request" for name in names}
    ids = {name: span.span_id for name, (_, span) in traced.items()} | {"": b""}
    assert {name: span.parent_span_id for name, (_, span) in traced.items()} == {
        name: ids[parent] for name, parent in parents.items()
    }
    for name, (service, span) in traced.items():
        assert service == f"kvxfer-{name.partition('.')[0]}"
        assert span.end_time_unix_nano >= span.start_time_unix_nano > 1.6e18


@pytest.mark.parametrize(
    ("option", "given", "mentioned"),
    [
        ("--metrics-port", "70000", "metrics_port: 70000: must be in"),
        ("--metrics-port", "many", "metrics-port"),
        ("--otlp-traces-endpoint", "nowhere", "otlp_traces_endpoint: 'nowhere': must be a URL"),
        ("--log-format", "xml", "log-format"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(option, given, mentioned):
    done = run(sys.executable, "-m", "prefill", "--model", str(TINY_MODEL), option, given)
    done.check_one_clear_line(2, mentioned)


def test_the_last_line_is_json_too():
    options = ["--model", "/nonexistent/model", "--log-format", "json", "--lane", "sideways"]
    done = run(sys.executable, "-m", "prefill", *options)
    assert done.code == 2
    *_, last = map(json.loads, done.err.splitlines())
    assert last["level"] == "CRITICAL" and "lane: 'sideways'" in last["message"]
