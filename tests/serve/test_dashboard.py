"""The live page's files, and its events over real workers (without a model, in this process)."""

import asyncio
import contextlib
import re
import tomllib
from pathlib import Path

import pytest
from starlette.applications import Starlette
from support.asgi_events import events_of, get
from support.commands import ROOT

from kvxfer.control.view_messages import ViewQuery
from kvxfer.serve.dashboard.events import FRESH_S, Watch
from kvxfer.serve.dashboard.picture import Changes
from kvxfer.serve.dashboard.routes import dashboard_routes
from kvxfer.serve.router import Router

HERE = ROOT / "kvxfer" / "serve" / "dashboard"


class Page:
    """The application over a cluster, which is turned in the loop."""

    def __init__(self, cluster, router, **options):
        self.cluster, self.router = cluster, router
        self.watch = Watch(router, period_s=0.02, **options)
        self.app = Starlette(routes=dashboard_routes(router, self.watch))

    def look(self, until, path="/ui/events"):
        """The answer to a watcher that leaves when its events are `until`."""
        return asyncio.run(self.run(get(self.app, path, lambda one: until(events_of(one.body)))))

    async def run(self, *waited):
        async def turn():
            while True:
                self.cluster.turn()
                await asyncio.sleep(0.001)

        turning = asyncio.create_task(turn())
        found = await asyncio.wait_for(asyncio.gather(*waited), 20)
        turning.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await turning
        return found[0] if len(found) == 1 else found


@pytest.fixture
def page(cluster):
    _, decode = cluster.pair("push")
    return Page(cluster, cluster.connect_router(decode))


def parts_of(events):
    """All parts as the last event leaves them."""
    known = {}
    for event in events:
        known |= event["parts"]
        for name in event["gone"]:
            del known[name]
    return known


def named(suffix):
    """Whether there is such a part, as a condition for `look`."""
    return lambda events: any(name.endswith(suffix) for name in parts_of(events))


def part(answer, suffix):
    return next(v for k, v in parts_of(events_of(answer.body)).items() if k.endswith(suffix))


# --- files ------------------------------------------------------------------------------------


def test_every_file_comes_from_here_with_its_type_and_a_strict_policy(page):
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/"}
    files = [path for path in HERE.iterdir() if path.suffix in kinds]
    assert len(files) > 5
    for path in files:
        answer = asyncio.run(get(page.app, f"/ui/{path.name}"))
        assert (answer.status, answer.body) == (200, path.read_bytes())
        assert answer.headers["content-type"].startswith(kinds[path.suffix])
        assert answer.headers["x-content-type-options"] == "nosniff"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert asyncio.run(get(page.app, "/ui")).body == (HERE / "page.html").read_bytes()
    assert asyncio.run(get(page.app, "/ui/routes.py")).status == 404


def test_the_page_needs_nothing_from_elsewhere_and_has_no_script_in_it():
    for path in HERE.iterdir():
        if path.suffix in (".html", ".css", ".js"):
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert "//" not in re.sub(r"^\s*//.*$|; // .*$|, // .*$| // .*$", "", text, flags=re.M)
            assert "innerHTML" not in text and "eval(" not in text
    html = (HERE / "page.html").read_text()
    assert re.findall(r"<script[^>]*>([^<]*)</script>", html) == [""]
    assert not re.search(r"\son\w+=|\sstyle=", html)


def test_the_files_are_part_of_the_package():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    globs = told["tool"]["setuptools"]["package-data"]["kvxfer.serve.dashboard"]
    shipped = {path for glob in globs for path in HERE.glob(glob)}
    wanted = {path for path in HERE.iterdir() if path.is_file() and path.suffix != ".py"}
    assert shipped == wanted


def test_every_module_that_a_script_names_is_there():
    for path in HERE.glob("*.js"):
        for name in re.findall(r'from "\./([^"]+)"', path.read_text()):
            assert (HERE / name).exists(), f"{path.name} imports {name}"


# --- events -----------------------------------------------------------------------------------


def test_a_watcher_is_told_of_each_worker_and_then_only_of_what_changes(page):
    answer = page.look(lambda events: named("/cache")(events) and len(events) > 20)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    events = events_of(answer.body)
    who, cache = part(answer, "/who"), part(answer, "/cache")
    assert who == {"name": "decode-0", "role": "decode", "is_there": True, "is_draining": False}
    decode = page.cluster.workers[1]
    assert cache["committed_bytes"] == decode.cache.committed_bytes
    assert cache["groups"][0]["usable"] == decode.pools.num_blocks[0]
    assert part(answer, "/lanes") == [{"peer": "prefill-0", "lane": "loopback/push", "gbps": 0.0}]
    assert parts_of(events)["requests"] == []
    assert not any(event["parts"] for event in events[-5:])
    times = [event["now_s"] for event in events]
    assert times == sorted(times)


def test_a_request_is_told_with_its_times_at_the_router_and_at_its_worker(page):
    decode = page.cluster.workers[1]
    sent = page.cluster.send(decode, num_tokens=10, max_new_tokens=4)

    def is_over(events):
        lives = parts_of(events)["requests"]
        told = [part for name, part in parts_of(events).items() if name.endswith("/requests")]
        names = [name for one in told for trail in one for name, _ in trail["states"]]
        return lives and lives[0]["reason"] and "ended" in names

    answer = page.look(is_over)
    (life,) = parts_of(events_of(answer.body))["requests"]
    assert (life["request_id"], life["decode"]) == (sent.completion.request_id, "decode-0")
    assert (life["num_prompt_tokens"], life["num_tokens"]) == (10, 4)
    assert life["reason"] == "length"
    assert life["arrived_s"] <= life["given_s"] <= life["first_token_s"] <= life["ended_s"]
    (trail,) = part(answer, "/requests")
    assert (trail["id"], trail["peer"]) == (life["request_id"], "prefill-0")
    at = dict(trail["states"])
    slack_s = 0.05  # of the placing of one clock on the other's
    assert life["given_s"] - slack_s <= at["waiting"] <= at["granted"] <= at["running"]
    assert at["running"] <= life["ended_s"] + slack_s


def test_growth_changes_the_picture(cluster):
    engine = {"capacity": 64, "bound": 64}
    _, decode = cluster.pair("push", engine=engine, kv_commit="elastic", kv_initial_blocks=4)
    page = Page(cluster, cluster.connect_router(decode))
    before = part(page.look(named("/cache")), "/cache")
    sent = cluster.send(decode, num_tokens=40, max_new_tokens=20)
    cluster.finish(sent)
    cluster.until_idle()
    page.watch._asked_s -= FRESH_S  # as if nobody had looked for longer
    after = part(page.look(named("/cache")), "/cache")
    assert after["committed_bytes"] > before["committed_bytes"]
    assert after["generation"] > before["generation"]
    first, later = before["groups"][0], after["groups"][0]
    assert later["committed"] > first["committed"] and later["usable"] > first["usable"]
    assert sum(size for _, size in after["registered"]) == after["committed_bytes"]


def test_nobody_looks_and_nothing_is_asked(page, monkeypatch):
    asked = []
    send = page.router._channel.send

    def keep(peer, message):
        if isinstance(message, ViewQuery):
            asked.append(message)
        send(peer, message)

    monkeypatch.setattr(page.router._channel, "send", keep)
    page.cluster.turn_for(0.2)
    assert asked == []
    page.look(lambda events: len(events) > 3)
    assert asked and page.watch.num_watchers == 0
    del asked[:]
    page.cluster.turn_for(0.2)
    assert asked == []


def test_many_watchers_cost_the_workers_no_more_than_one(page):
    def one_watcher():
        return get(page.app, "/ui/events", lambda one: len(events_of(one.body)) > 10)

    num_asked = []
    ask = page.router.ask_views
    page.router.ask_views = lambda: (num_asked.append(1), ask())
    asyncio.run(page.run(*(one_watcher() for _ in range(8))))
    assert len(num_asked) <= 14  # 11 periods, and what a slow machine adds


def test_watchers_are_bounded_and_one_that_leaves_makes_room(cluster, page):
    page = Page(cluster, page.router, max_watchers=2)

    async def crowd():
        is_over = asyncio.Event()

        def stay():
            return get(page.app, "/ui/events", lambda one: is_over.is_set())

        staying = [asyncio.create_task(stay()) for _ in range(2)]
        while page.watch.num_watchers < 2:
            await asyncio.sleep(0.001)
        refused = await get(page.app, "/ui/events")
        is_over.set()
        await asyncio.gather(*staying)
        return refused, await get(page.app, "/ui/events", lambda one: bool(events_of(one.body)))

    refused, taken = asyncio.run(page.run(crowd()))
    assert (refused.status, refused.headers["retry-after"]) == (503, "5")
    assert refused.body == b"2 watch already: try again later\n"
    assert taken.status == 200 and page.watch.num_watchers == 0


def test_closing_ends_the_streams(page):
    async def close_soon():
        await asyncio.sleep(0.05)
        page.watch.close()

    answer, _ = asyncio.run(page.run(get(page.app, "/ui/events"), close_soon()))
    assert answer.status == 200 and events_of(answer.body)
    assert asyncio.run(get(page.app, "/ui/events")).status == 503


def test_a_worker_that_is_lost_is_said_to_be_and_its_picture_goes(cluster):
    _, decode = cluster.pair("push")
    cluster.connect_router(decode).close()
    router = cluster.router = Router(peer_timeout_s=0.3, survives_loss=True)
    router.add(decode.address)
    page = Page(cluster, router)

    def lost(events):
        if named("/cache")(events):
            cluster.workers.clear()
        gone = [name for event in events for name in event["gone"]]
        away = [v for k, v in parts_of(events).items() if k.endswith("/who") and not v["is_there"]]
        return away and any(name.endswith("/cache") for name in gone)

    workers = list(cluster.workers)
    try:
        answer = page.look(lost)
    finally:
        cluster.workers.extend(workers)
    assert part(answer, "/who")["role"] == "decode"


def test_changes_are_told_once():
    changes = Changes()

    def told(parts):
        return events_of(b"data: " + changes.since(parts, 1.0) + b"\n\n")[0]

    assert told({"a": b"1", "b": b"[2]"}) == {"now_s": 1.0, "parts": {"a": 1, "b": [2]}, "gone": []}
    assert told({"a": b"1", "b": b"[3]"})["parts"] == {"b": [3]}
    assert told({"b": b"[3]"}) == {"now_s": 1.0, "parts": {}, "gone": ["a"]}
    assert told({"a": b"1", "b": b"[3]"})["parts"] == {"a": 1}


def test_no_file_is_too_long():
    assert all(len(path.read_text().splitlines()) < 300 for path in Path(HERE).glob("*.*s"))
