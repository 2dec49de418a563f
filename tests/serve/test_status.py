"""`kvxfer status` against what answers, what does not, and what is no router."""

import io
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest
from rich.console import Console

from kvxfer.errors import KvxferError
from kvxfer.serve.backend import Backend
from kvxfer.serve.overview import Overview, WorkerProcess, overview
from kvxfer.serve.progress import StartScreen
from kvxfer.serve.status import StatusOptions, run_status
from kvxfer.serve.status_screen import StatusScreen


def example() -> Overview:
    prefill = Backend("out:ipc:///p", role="prefill")
    decode = Backend("out:ipc:///[bold]d", role="decode")
    decode.status = {
        "blocks_total": 128, "committed_bytes": 3 << 20, "requests": 4, "queued": 2,
        "lane p": "peer/pull", "lane_gbps p": 12.345, "lane q": "nixl/push",
        "refused x": "model differs",
    }  # fmt: skip
    found = overview("tiny", 5, True, [decode, prefill])
    process = WorkerProcess("prefill-0", 77, "waiting", 2, "was killed by SIGKILL")
    return msgspec.structs.replace(found, processes=[process])


@contextmanager
def answering(code, body, asked=None):
    """An HTTP server that gives one answer to all."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if asked is not None:
                asked.append((self.path, self.headers.get("Authorization")))
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def shown(found):
    out = io.StringIO()
    StatusScreen("http://x", Console(file=out, width=150)).show(found, again=False)
    return out.getvalue()


def test_the_tables_hold_what_is_told():
    text = shown(example())
    for word in (
        "tiny at http://x: 5 requests under way, draining", "ipc:///[bold]d", "greeting", "128",
        "3.0", "peer/pull", "12.3", "not tried", "model differs", "was killed by SIGKILL", "77",
    ):  # fmt: skip
        assert word in text, text
    assert text.index("ipc:///p") < text.index("ipc:///[bold]d"), "prefill comes first"


def test_nobody_there_yet_is_shown_too():
    assert "0 requests under way" in shown(overview("m", 0, False, []))


def test_what_a_router_says_is_printed_as_json(capsys, monkeypatch):
    monkeypatch.setenv("KVXFER_API_KEY", "mine")
    asked = []
    with answering(200, msgspec.json.encode(example()), asked) as url:
        assert run_status(StatusOptions(url=url + "/", json=True)) == 0
        assert run_status(StatusOptions(url=url, json=True, api_key="other")) == 0
    first = capsys.readouterr().out
    assert json.loads(first[: len(first) // 2]) == msgspec.to_builtins(example())
    assert asked == [("/status", "Bearer mine"), ("/status", "Bearer other")]


WRONG = [
    (401, b"{}", "give --api-key"),
    (404, b"", "answered 404"),
    (500, b"", "answered 500"),
    (200, b"<html>", "no router of kvxfer"),
    (200, b'{"model": 5}', "no router of kvxfer"),
    (200, b"", "no router of kvxfer"),
]


@pytest.mark.parametrize(("code", "body", "mentioned"), WRONG)
def test_what_is_no_router_is_one_line(code, body, mentioned):
    with answering(code, body) as url, pytest.raises(KvxferError) as refused:
        run_status(StatusOptions(url=url, timeout_s=5.0))
    assert mentioned in str(refused.value)
    assert url in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "mentioned"),
    [
        ({"url": "http://127.0.0.1:9"}, "nobody answers: Connection refused"),
        ({"url": "127.0.0.1:8000"}, "must begin with http://"),
        ({"url": "http://127.0.0.1:99999"}, "nobody answers"),
        ({"url": "http://"}, "nobody answers"),
        ({"url": "http://x y"}, "nobody answers"),
        ({"interval_s": 0.0}, "interval_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
    ],
)
def test_what_cannot_be_asked_is_one_line(options, mentioned):
    with pytest.raises(KvxferError, match=mentioned) as refused:
        run_status(StatusOptions(**options))
    assert "\n" not in str(refused.value)


def test_steps_are_lines_where_there_is_no_terminal():
    out = io.StringIO()
    with StartScreen(["a", "b"], Console(file=out)) as screen:
        screen.step("a", "loading [x]")
    screen.step("a", "is shown no more")
    assert out.getvalue() == "a: loading [x]\n"


def test_steps_are_a_table_on_a_terminal():
    out = io.StringIO()
    with StartScreen(["a", "b"], Console(file=out, force_terminal=True, width=60)) as screen:
        screen.step("a", "loading [x]")
    assert "loading [x]" in out.getvalue()
    assert "starting" in out.getvalue()
