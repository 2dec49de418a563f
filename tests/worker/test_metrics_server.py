"""A worker's metrics over HTTP: its control thread makes the text, clients hold up nobody."""

import http.client
import select
import socket
import threading
import time
import urllib.request

import pytest
from support.exposition import read, value
from support.running import wait_until
from support.service_processes import free_port

from kvxfer.errors import UsageError
from kvxfer.worker import metrics_server
from kvxfer.worker.mailbox import Mailbox
from kvxfer.worker.metrics import unready
from kvxfer.worker.metrics_server import MAX_CONNECTIONS, MetricsServer
from kvxfer.worker.residency import ResidencyState


@pytest.fixture
def reports():
    made = Mailbox()
    yield made
    made.close()


@pytest.fixture
def server(reports):
    made = MetricsServer("127.0.0.1", 0)
    before = threading.active_count()
    made.start(reports, lambda: f"kvxfer_peers {threading.get_ident()}\n")
    yield made
    made.close()
    made.close()
    assert threading.active_count() == before


def drain_until(reports, done, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not done() and time.monotonic() < deadline:
        for report in reports.drain():
            report()
        time.sleep(0.002)


def port_of(server):
    return int(server.url.split(":")[2].split("/")[0])


def ask(server, reports, path="/metrics"):
    """Status, content type and body, while this thread is the control thread."""
    found = []

    def run():
        connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=5)
        connection.request("GET", path)
        answer = connection.getresponse()
        found.append((answer.status, answer.getheader("Content-Type"), answer.read().decode()))
        connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    drain_until(reports, lambda: not thread.is_alive())
    thread.join(5)
    return found[0]


def test_the_text_is_made_in_the_thread_that_drains(server, reports):
    status, kind, text = ask(server, reports)
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    assert value(text, "kvxfer_peers") == threading.get_ident()


def test_other_paths_are_not_there(server, reports):
    assert ask(server, reports, "/")[0] == 404
    assert ask(server, reports, "/metrics?name=x")[0] == 200


def test_a_worker_that_does_not_answer_is_503(server, monkeypatch):
    monkeypatch.setattr(metrics_server, "ANSWER_TIMEOUT_S", 0.05)
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(server.url, timeout=5)
    assert error.value.code == 503
    error.value.close()


def test_silent_clients_are_cut_and_bounded(server, reports, monkeypatch):
    silent = [socket.create_connection(("127.0.0.1", port_of(server))) for _ in range(12)]
    num_refused = len(silent) - MAX_CONNECTIONS
    wait_until(lambda: len(select.select(silent, [], [], 0)[0]) == num_refused, 5, "refusals")
    monkeypatch.setattr(metrics_server, "CONNECTION_TIMEOUT_S", 0.1)
    for one in silent:
        one.settimeout(5)
        assert one.recv(1) == b""
        one.close()
    wait_until(lambda: not server._server._open, 5, "their threads to end")
    monkeypatch.undo()
    assert ask(server, reports)[0] == 200


def test_an_address_that_cannot_be_bound_is_a_usage_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"metrics_port: '127.0.0.1:{port}': cannot bind"):
            MetricsServer("127.0.0.1", port)
    for host in ("no such host", "x" * 100, "é" * 300):
        with pytest.raises(UsageError, match="cannot bind"):
            MetricsServer(host, 0)


def test_probes_tell_life_from_readiness(server, reports):
    assert [ask(server, reports, path)[0::2] for path in ("/health", "/ready")] == [
        (200, "ok\n")
    ] * 2
    other = MetricsServer("127.0.0.1", 0)
    try:
        other.start(reports, lambda: "", lambda: "draining: a test")
        assert ask(other, reports, "/health")[0] == 200
        assert ask(other, reports, "/ready?x=1")[0::2] == (503, "draining: a test\n")
    finally:
        other.close()


def test_a_worker_is_ready_until_it_drains(cluster):
    worker = cluster.add("decode", idle=True)
    assert unready(worker.parts) == ""
    worker.parts.draining.begin("the host goes away")
    assert unready(worker.parts) == "draining: the host goes away"


def test_a_worker_that_sleeps_is_not_ready(cluster):
    worker = cluster.add("decode", idle=True)
    worker.parts.residency.state = ResidencyState.ASLEEP
    assert unready(worker.parts) == "asleep"


def test_a_worker_serves_its_own(cluster):
    """The server as `assembly.serve` puts it together, with a worker that is turned."""
    worker = cluster.add("decode")
    server = MetricsServer("127.0.0.1", free_port())
    worker.parts.metrics.serve(worker.parts, server, worker.reports)
    found = []
    thread = threading.Thread(
        target=lambda: found.append(urllib.request.urlopen(server.url, timeout=5).read().decode())
    )
    thread.start()
    cluster.until(lambda: bool(found))
    thread.join(5)
    server.close()
    assert value(found[0], "kvxfer_num_requests_running") == 0
    assert "kvxfer_blocks" in read(found[0])
