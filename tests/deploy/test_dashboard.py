"""The shipped Grafana dashboard and alerts ask only for what kvxfer tells.

The metrics are those of a real router and real workers (`support.http_service`), whose names,
labels and values a query must find there. What Prometheus makes of them: test_prometheus.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from starlette.routing import Route
from support.dashboard import BUILT_IN, PATH, filled_in, load, queries, used_variables, variables
from support.exposition import read
from support.http_service import MODEL, HttpService
from support.shipped import DEPLOY, alerts, prometheus_config

from kvxfer.serve.metrics_route import metrics_route

promql = pytest.importorskip("support.promql", reason="needs promql-parser: kvxfer[test]")

DASHBOARD = load()
QUERIES = list(queries(DASHBOARD))
ALERTS = [(rule["alert"], rule["expr"]) for rule in alerts()]
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds to each sample."""


@pytest.fixture(scope="module")
def series():
    """Labels of each series by name, as a Prometheus with the shipped configuration has them."""
    made = {}

    async def endpoint(request):
        if "route" not in made:
            made["route"] = metrics_route(service.router, service.front)
        return await made["route"].endpoint(request)

    def rate_lanes():
        """In-process lanes are not tried out: as a trial would leave them."""
        for worker in (service.prefill, service.decode):
            for peer in worker.peers.ready():
                peer.lane_gbps = 1.0

    with HttpService(routes=[Route("/metrics", endpoint)]) as service:
        service.within(rate_lanes)
        service.ask(model=MODEL, prompt="To be, or not", max_tokens=4)
        service.until_idle()
        _, _, body = service.send("GET", "/metrics")
    text = body.decode()
    found: dict[str, list[dict[str, str]]] = {}
    for samples in read(text).values():
        for name, labels in samples:
            one = {**dict(labels), "job": "kvxfer-worker", "instance": "x"}
            found.setdefault(name, []).append(one)
    found["up"] = [
        {"job": job["job_name"], "instance": target, **group.get("labels", {})}
        for job in prometheus_config()["scrape_configs"]
        for group in job["static_configs"]
        for target in group["targets"]
    ]
    return found


def wrong_with(expression, series):
    """What an expression asks for that is not there."""
    found = promql.relies(expression)
    known = set(found.made)
    for selector in found.selectors:
        if selector.name not in series:
            yield f"there is no metric {selector.name}"
            continue
        labels = set().union(*series[selector.name])
        known |= labels
        matchers = selector.matchers.matchers
        for matcher in matchers:
            if matcher.name not in labels:
                yield f"{selector.name} has no label {matcher.name}"
        fitting = [
            one
            for one in series[selector.name]
            if all(promql.matches(matcher, one.get(matcher.name, "")) for matcher in matchers)
        ]
        if not fitting:
            yield f"no series of {selector.name} fits {selector.matchers}"
    for label in sorted(found.labels - known):
        yield f"no metric here has a label {label}"


def as_sent(expression):
    """For all workers; where a panel stands for one, for this."""
    return filled_in(expression.replace('="$worker"', '="decode-0"'), ".+", "1m")


def test_every_query_finds_what_kvxfer_tells(series):
    assert len(QUERIES) > 40
    wrong = [
        (title, reason)
        for title, expression in QUERIES
        for reason in wrong_with(as_sent(expression), series)
    ]
    assert wrong == []


def test_every_alert_finds_what_kvxfer_tells(series):
    wrong = [
        (name, reason) for name, expression in ALERTS for reason in wrong_with(expression, series)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("kvxfer_cache_commited_bytes", "no metric kvxfer_cache_commited_bytes"),
        ("kvxfer_transfer_seconds", "no metric kvxfer_transfer_seconds"),  # it has no bare sample
        ('kvxfer_blocks{status="free"}', "no label status"),
        ('kvxfer_blocks{state="quarantine"}', "no series"),
        ("sum by (lane) (kvxfer_peers)", "no metric here has a label lane"),
        ("kvxfer_peers * on (rank) kvxfer_peers", "no metric here has a label rank"),
    ],
)
def test_what_is_not_there_is_found_out(series, expression, reason):
    assert any(reason in text for text in wrong_with(expression, series))


def test_no_promql_is_found_out(series):
    with pytest.raises(ValueError, match=r".+"):
        list(wrong_with("sum by (le (kvxfer_peers)", series))


def test_every_variable_is_defined_and_used():
    defined = set(variables(DASHBOARD))
    used = used_variables(DASHBOARD)
    assert used - BUILT_IN == defined


def test_what_variables_ask_for_is_there(series):
    query = variables(DASHBOARD)["worker"]["query"]["query"]
    metric, label = query.removeprefix("label_values(").removesuffix(")").split(", ")
    assert all(label in one for one in series[metric])


def test_panels_have_places_and_names_of_their_own():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells


def test_provisioning_names_what_is_mounted():
    where = DEPLOY / "grafana" / "provisioning"
    provider = yaml.safe_load((where / "dashboards" / "kvxfer.yml").read_text())["providers"][0]
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    mounts = dict(volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"])
    path = Path(provider["options"]["path"]) / PATH.name
    assert mounts["../grafana/kvxfer.json"] == str(path)
    source = yaml.safe_load((where / "datasources" / "prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    assert "prometheus" in compose["services"]
