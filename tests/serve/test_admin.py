"""What is served for whoever runs the service: over real workers, without a socket."""

import msgspec
import pytest
from starlette.applications import Starlette
from support.asgi import ask

from kvxfer.errors import UsageError
from kvxfer.serve.admin import MOST_BODY_BYTES, admin_routes
from kvxfer.serve.backend import Backend, BackendState
from kvxfer.serve.overview import Overview, overview

KEY = {"Authorization": "Bearer secret"}


@pytest.fixture
def pair(cluster):
    prefill, decode = cluster.pair("push", peer_timeout_s=3.0)
    cluster.connect_router(decode)
    return cluster, prefill, decode


def make_app(cluster, **options):
    router = cluster.router
    return Starlette(
        routes=admin_routes(router, lambda: overview("m", 3, True, router.backends), **options)
    )


def test_status_tells_of_workers_their_caches_and_lanes(pair):
    cluster, prefill, decode = pair
    app = make_app(cluster, may_change=True)
    told = {"address": prefill.address, "role": "prefill"}
    assert ask(app, "POST", "/workers", msgspec.json.encode(told)).code == 202
    cluster.until(lambda: all(one.status for one in cluster.router.backends))
    answer = ask(app, "GET", "/status")
    assert answer.code == 200
    found = msgspec.json.decode(answer.body, type=Overview)
    assert (found.model, found.num_requests, found.is_draining) == ("m", 3, True)
    first, second = found.workers
    assert (first.role, second.role) == ("prefill", "decode")
    for one, worker in ((first, prefill), (second, decode)):
        cache = worker.engine.cache
        assert one.address == worker.address
        assert (one.state, one.device) == ("ready", "cpu")
        assert one.cache.committed_bytes == cache.committed_bytes > 0
        assert one.cache.blocks_total == worker.engine.pools.counts().total
    assert [lane.peer for lane in second.lanes] == [first.id]
    assert second.lanes[0].lane.endswith("/push")
    assert ask(app, "GET", "/workers").json["workers"] == answer.json["workers"]


def test_a_worker_that_is_drained_is_given_nothing_new(pair):
    cluster, _, _ = pair
    app = make_app(cluster, may_change=True)
    worker_id = cluster.router.backends[0].name
    assert ask(app, "POST", f"/workers/{worker_id}/drain").json == {"id": worker_id}
    assert cluster.router.backends[0].state is BackendState.DRAINING
    assert ask(app, "GET", "/workers").json["workers"][0]["state"] == "draining"


WRONG = [
    (b"", 400, "body"),
    (b"{", 400, "body"),
    (b"[]", 400, "object"),
    (b"{}", 400, "address"),
    (b'{"address": 5, "role": "prefill"}', 400, "address"),
    (b'{"address": "ipc:///x", "role": "router"}', 400, "role"),
    (b'{"address": "ipc:///x", "role": "decode", "more": 1}', 400, "more"),
    (b'{"address": "tcp://10.1.2.3:5", "role": "decode"}', 400, "10.1.2.3"),
    (b'{"address": "nonsense", "role": "decode"}', 400, "nonsense"),
    (b'{"address": "' + b"x" * MOST_BODY_BYTES + b'", "role": "decode"}', 400, "body"),
]


@pytest.mark.parametrize(("body", "code", "mentioned"), WRONG)
def test_what_is_no_worker_is_refused_and_changes_nothing(cluster, body, code, mentioned):
    decode = cluster.add("decode", lane="push", peer_timeout_s=3.0)
    cluster.connect_router(decode)
    before = cluster.router.backends
    answer = ask(make_app(cluster, may_change=True), "POST", "/workers", body)
    assert answer.code == code
    assert mentioned in answer.json["error"]["message"]
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert cluster.router.backends == before


def test_a_worker_that_nobody_knows_cannot_be_drained(pair):
    answer = ask(make_app(pair[0], may_change=True), "POST", "/workers/who/drain")
    assert answer.code == 404
    assert "who" in answer.json["error"]["message"]


def test_changes_are_there_only_where_they_were_enabled(pair):
    cluster, prefill, _ = pair
    app = make_app(cluster)
    body = msgspec.json.encode({"address": prefill.address, "role": "prefill"})
    assert ask(app, "POST", "/workers", body).code == 405
    assert ask(app, "POST", "/workers/x/drain").code == 404
    assert ask(app, "GET", "/workers").code == 200


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic secret"}, 401),
        ({"Authorization": "secret"}, 401),
        ({"Authorization": "Bearer gehört nicht"}, 401),
        (KEY, 200),
        ({"Authorization": "bearer  other"}, 200),
    ],
)
def test_all_of_it_wants_the_key(headers, code):
    app = Starlette(routes=admin_routes(None, lambda: overview("m", 0, False, []), api_keys=("secret", "other")))  # fmt: skip # noqa: E501
    answer = ask(app, "GET", "/status", headers=headers)
    assert answer.code == code
    assert code == 200 or answer.json["error"]["code"] == "invalid_api_key"


def test_a_workers_word_that_is_no_number_counts_as_not_said():
    backend = Backend("out:ipc:///x", role="prefill")
    backend.status = {"blocks_total": "many", "lane a": "peer/pull", "lane_gbps a": 2.5,
                      "lane b": "x", "refused out:y": "model differs"}  # fmt: skip
    (worker,) = overview("m", 0, False, [backend]).workers
    assert worker.cache.blocks_total == 0
    assert [(lane.peer, lane.gbps) for lane in worker.lanes] == [("a", 2.5), ("b", 0.0)]
    assert worker.refused == ["model differs"]
    assert (worker.id, worker.state) == ("ipc:///x", "greeting")


def test_scale_is_there_where_workers_are_placed_by_us(pair):
    cluster, _, _ = pair
    asked = []

    def scale(counts):
        if counts.get("decode") == 0:
            raise UsageError("decode", 0, "must be between 1 and 1024")
        asked.append(counts)
        return {"prefill": 1, "decode": 1} | counts

    app = make_app(cluster, may_change=True, scale=scale)
    answer = ask(app, "POST", "/scale", b'{"prefill": 3}')
    assert (answer.code, answer.json) == (202, {"prefill": 3, "decode": 1})
    wrong = ask(app, "POST", "/scale", b'{"decode": 0}')
    assert (wrong.code, wrong.json["error"]["param"]) == (400, "decode")
    for body in (b'{"router": 1}', b'{"prefill": "3"}', b"3", b""):
        assert ask(app, "POST", "/scale", body).code == 400
    assert asked == [{"prefill": 3}]
    for options in ({"may_change": True}, {"scale": scale}):
        other = make_app(cluster, **options)
        assert ask(other, "POST", "/scale", b'{"prefill": 3}').code in (404, 405)
