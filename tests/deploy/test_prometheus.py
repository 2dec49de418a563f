"""Prometheus itself on what is shipped for it: its tools on files, and, with --slow, a server that
scrapes the compose file's processes, run on loopback addresses by their own commands."""

from __future__ import annotations

import http.client
import json
import math
import os
import shutil
import subprocess
import urllib.parse

import pytest
import yaml
from support.commands import KVXFER, TINY_MODEL
from support.dashboard import filled_in, load, queries
from support.processes import Processes, strings
from support.service_processes import free_port
from support.shipped import DEPLOY, compose, prometheus_config

SUBNET = f"127.77.{os.getpid() % 250}"
START_TIMEOUT_S = 400
HAVE_DATA = {
    "Workers up", "Scraped processes down", "Requests under way", "Tokens a second",
    "Time to first token", "Inter-token latency", "Request latency", "Requests ended",
    "Queues: waiting", "Queues: running", "KV cache of $worker", "Blocks by state",
    "Blocks in quarantine", "Prefix cache hits", "Moved, by lane", "Rate while a transfer runs",
    "A transfer takes", "Transfers that failed", "Bytes in a run", "Lanes, as tried out", "Peers",
    "Growths", "Versions",
}  # fmt: skip
"""Panels whose every query must tell something after a few requests."""


def tool(name):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here: apt-get install prometheus")
    return found


@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml")),
        ("check", "rules", str(DEPLOY / "prometheus" / "alerts.yml")),
        ("test", "rules", str(DEPLOY.parent / "tests" / "deploy" / "alerts_test.yml")),
    ],
    ids=["configuration", "rules", "alerts fire"],
)
def test_promtool_agrees(words):
    done = subprocess.run([tool("promtool"), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test():
    text = (DEPLOY.parent / "tests" / "deploy" / "alerts_test.yml").read_text()
    fired = {
        one["alertname"]
        for test in yaml.safe_load(text)["tests"]
        for one in test["alert_rule_test"]
        if one["exp_alerts"]
    }
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
    assert fired == {rule["alert"] for rule in rules}


def ask(host, port, path, body=None):
    """Status and bytes; 0 where nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    try:
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body) if body else None
        connection.request("POST" if body else "GET", path, data, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except OSError:
        return 0, b""
    finally:
        connection.close()


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """Asks a Prometheus that scrapes the services of the compose file."""
    path = tool("prometheus")
    root = tmp_path_factory.mktemp("compose")
    services = compose({"KVXFER_SUBNET": SUBNET, "KVXFER_MEMORY_BUDGET_BYTES": str(1 << 30)})[
        "services"
    ]
    keys, sockets = root / "keys", root / "peer"
    sockets.mkdir(mode=0o700)
    subprocess.run([*KVXFER, "keygen", str(keys), "cluster"], check=True, timeout=60)
    told = {
        "KVXFER_MODEL": str(TINY_MODEL),
        "KVXFER_KEY_FILE": str(keys / "cluster.key"),
        "KVXFER_PEER_KEYS": str(keys),
        "KVXFER_PEER_DIR": str(sockets),
    }
    ours = ("prefill-0", "prefill-1", "decode-0", "decode-1", "router")
    with Processes(root) as processes:
        for name in ours:
            environment = strings(services[name]["environment"]) | told
            processes.start(name, [*KVXFER, *services[name]["command"]], **environment)
        port = free_port()
        config = write_config(root, services)
        processes.start(
            "prometheus",
            [path, f"--config.file={config}", f"--storage.tsdb.path={root / 'data'}",
             f"--web.listen-address=127.0.0.1:{port}"],
        )  # fmt: skip
        router = services["router"]["networks"]["kvxfer"]["ipv4_address"], 8000

        def all_are_ready():
            status, body = ask(*router, "/ready")
            return status == 200 and b'"prefill":2,"decode":2' in body.replace(b" ", b"")

        processes.until(all_are_ready, START_TIMEOUT_S, "all workers ready")
        make_requests(*router)

        def query(kind, **arguments):
            status, body = ask(
                "127.0.0.1", port, f"/api/v1/{kind}?{urllib.parse.urlencode(arguments)}"
            )
            return status, json.loads(body or "{}")

        def has_scraped():
            found = query("query", query='kvxfer_generation_tokens_total{worker="router"} > 100')[1]
            return bool(found.get("data", {}).get("result"))

        processes.until(has_scraped, 30, "Prometheus knows of the requests")
        make_requests(*router)  # a rate needs two samples
        processes.until(lambda: len(up(query)) == 5, 30, "each process is scraped")
        yield query


def write_config(root, services):
    """The shipped one, with names that only compose resolves replaced, and shorter intervals."""
    config = prometheus_config()
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    for job in config["scrape_configs"]:
        for group in job["static_configs"]:
            for index, target in enumerate(group["targets"]):
                name, port = target.split(":")
                address = services[name]["networks"]["kvxfer"]["ipv4_address"]
                group["targets"][index] = f"{address}:{port}"
    shutil.copy2(DEPLOY / "prometheus" / "alerts.yml", root)
    (root / "prometheus.yml").write_text(yaml.safe_dump(config))
    return root / "prometheus.yml"


def make_requests(host, port):
    for number in range(8):
        prompt = f"{number}. To be, or not to be, that is the question. " * 6
        body = {"model": str(TINY_MODEL), "prompt": prompt, "max_tokens": 24}
        status, text = ask(host, port, "/v1/completions", body)
        assert status == 200, text


def up(query):
    return query("query", query='up{job=~"kvxfer.*"} == 1')[1]["data"]["result"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_query_of_the_dashboard_is_answered(prometheus):
    wrong, empty = [], []
    for title, expression in queries(load()):
        sent = filled_in(expression.replace('="$worker"', '="decode-0"'), ".+", "20s")
        status, answer = prometheus("query", query=sent)
        if status != 200 or answer["status"] != "success":
            wrong.append((title, answer))
            continue
        values = [float(one["value"][1]) for one in answer["data"]["result"]]
        if title in HAVE_DATA and not any(math.isfinite(value) for value in values):
            empty.append((title, sent))
    assert (wrong, empty) == ([], [])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_series_comes_once_and_says_whose_it_is(prometheus):
    found = prometheus(
        "query", query='count by (worker, role) ({__name__=~"kvxfer_num_requests_running"})'
    )
    counted = {
        (one["metric"]["worker"], one["metric"]["role"]): one["value"][1]
        for one in found[1]["data"]["result"]
    }
    workers = {(f"{role}-{index}", role) for role in ("prefill", "decode") for index in (0, 1)}
    assert counted == dict.fromkeys({*workers, ("router", "router")}, "1")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_alerts_are_evaluated_and_none_fires_where_all_is_well(prometheus):
    (group,) = prometheus("rules")[1]["data"]["groups"]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert {
        rule["name"]: rule["state"] for rule in group["rules"] if rule["state"] == "firing"
    } == {}
