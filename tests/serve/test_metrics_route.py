"""GET /metrics: the router's metrics and its workers', over HTTP."""

import threading
from types import SimpleNamespace

import pytest
from starlette.routing import Route
from support.exposition import read, value
from support.http_service import MODEL, HttpService
from support.running import wait_until

from kvxfer.control.telemetry_messages import MetricsQuery
from kvxfer.serve import metrics_route as module
from kvxfer.serve.metrics_route import merge, metrics_route
from kvxfer.serve.scrapes import Scrape, Scrapes
from kvxfer.telemetry.families import FAMILIES

SIDES = {"prefill": "prefill-0", "decode": "decode-0"}


@pytest.fixture(scope="module")
def service():
    made = {}

    async def endpoint(request):
        if "route" not in made:
            made["route"] = metrics_route(found.router, found.front)
        return await made["route"].endpoint(request)

    with HttpService(routes=[Route("/metrics", endpoint)]) as found:
        yield found


def scraped(service):
    status, headers, body = service.send("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=")
    return body.decode()


def of_router(text, name, **labels):
    return value(text, name, worker="router", role="router", **labels)


def test_one_exposition_has_the_router_and_all_workers(service):
    before = scraped(service)
    status, told = service.ask(model=MODEL, prompt="Once upon", max_tokens=4)
    assert status == 200
    service.until_idle()
    text = scraped(service)
    assert set(read(text)) <= set(FAMILIES)
    for samples in read(text).values():
        for _, labels in samples:
            assert dict(labels)["role"] == dict(labels)["worker"].removesuffix("-0")
    for role, worker in SIDES.items():
        assert value(text, "kvxfer_peers", worker=worker, role=role) == 1
    usage = told["usage"]
    for name, key in (("prompt", "prompt_tokens"), ("generation", "completion_tokens")):
        total = f"kvxfer_{name}_tokens_total"
        assert of_router(text, total) - of_router(before, total) == usage[key]
    labels = {"finished_reason": "length"}
    ended = "kvxfer_request_success_total"
    assert of_router(text, ended, **labels) - of_router(before, ended, **labels) == 1
    assert of_router(text, "kvxfer_time_to_first_token_seconds_count") >= 1
    gaps = "kvxfer_inter_token_latency_seconds_count"
    assert of_router(text, gaps) - of_router(before, gaps) == usage["completion_tokens"] - 1
    assert of_router(text, "kvxfer_scrape_failures_total") == 0


def test_a_client_that_leaves_is_counted_as_cancelled(service):
    service.hold()
    body = service.post_bytes(prompt="Once", max_tokens=50, stream=True)
    with service.socket(body) as connection:
        assert connection.recv(1)
        assert of_router(scraped(service), "kvxfer_num_requests_running") == 1
    service.release()
    service.until_idle()
    text = scraped(service)
    assert of_router(text, "kvxfer_request_success_total", finished_reason="cancelled") == 1
    assert of_router(text, "kvxfer_num_requests_running") == 0


def test_a_worker_that_does_not_answer_is_left_out_and_counted(service, monkeypatch):
    monkeypatch.setattr(module, "SCRAPE_TIMEOUT_S", 0.1)
    handlers = service.decode.loop._handlers
    monkeypatch.setitem(handlers, MetricsQuery, lambda key, query: None)
    found = []
    threads = [threading.Thread(target=lambda: found.append(scraped(service))) for _ in range(3)]
    for one in threads:
        one.start()
    wait_until(lambda: len(found) == 3, 10, "three answers")
    for one in threads:
        one.join(5)
    text = found[0]
    assert value(text, "kvxfer_peers", worker="prefill-0", role="prefill") == 1
    with pytest.raises(KeyError):
        value(text, "kvxfer_peers", worker="decode-0", role="decode")
    assert 1 <= of_router(text, "kvxfer_scrape_failures_total") <= 3


def named(name, role="decode"):
    return SimpleNamespace(worker_id=name, role=role)


def test_whose_text_cannot_be_read_costs_only_its_own():
    parts = [(named("good"), "kvxfer_peers 1\n"), (named("bad"), "kvxfer_peers{")]
    merged, failed = merge(parts)
    assert failed == ["bad"]
    assert value(merged.text(), "kvxfer_peers", worker="good", role="decode") == 1


def test_every_worker_of_a_scrape_is_told_or_failed_once():
    scrapes, done = Scrapes(), []
    first = Scrape({key: named(key) for key in "abc"})
    second = Scrape({"a": named("a")})
    for scrape in (first, second):
        scrape.on_done = lambda scrape=scrape: done.append(scrape)
        scrapes.add(scrape)
    scrapes.told("a", "1")
    assert done == [second]
    scrapes.told("a", "2")
    scrapes.lost("b")
    scrapes.lost("b")
    assert done == [second] and first.missing == {"c"}
    first.give_up()
    scrapes.told("c", "3")
    assert done == [second, first]
    assert ([text for _, text in first.texts], first.num_failed) == (["1"], 2)
    assert [text for _, text in second.texts] == ["1"]
