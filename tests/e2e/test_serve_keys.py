"""`kvxfer serve` with keys for both sides: clients show an API key, workers and router their CURVE
keys. Who has none, or a wrong one, gets nothing and joins nothing."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.by_hand import HandStarted, hand_started
from support.commands import TINY_MODEL
from support.fork_server import ForkServer
from support.keys import KeyRing
from support.running import wait_until
from support.served import Served

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")
API_KEY = "sk-of-this-test"
NOT_JOINED_S = 5.0
"""For one that must not join: one that may does so within a second of its start."""
COMPLETION = {"model": "tiny", "prompt": "HAMLET.\nTo be", "max_tokens": 8, "temperature": 0}
PATHS: tuple[tuple[str, Any], ...] = (
    ("/v1/models", None),
    ("/v1/completions", COMPLETION),
    ("/v1/chat/completions", COMPLETION),
    ("/status", None),
    ("/workers", {"address": "tcp://127.0.0.1:9", "role": "decode"}),
    ("/workers/decode-0/drain", {}),
)


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    found = KeyRing(tmp_path)
    found.make("serve")
    found.make("guest")
    found.make("stranger", allow=False)
    return found


def flags(ring: KeyRing, name: str) -> tuple[str, ...]:
    return ("--key-file", str(ring.secret(name)), "--peer-keys", str(ring.allowed))


@pytest.fixture
def served(ring: KeyRing, tmp_path: Path) -> Iterator[Served]:
    options = ("--model", str(TINY_MODEL), "--served-model-name", "tiny", "--port", "0",
               "--kv-cache-memory-bytes", str(32 << 20), "--enable-admin",
               "--log-dir", str(tmp_path / "logs"), *flags(ring, "serve"))  # fmt: skip
    with Served(tmp_path, *options, KVXFER_API_KEY=API_KEY) as found:
        yield found


def send(url: str, body: Any = None, key: str = API_KEY) -> tuple[int, Any]:
    """Status and decoded body."""
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as got:
            return got.status, json.loads(got.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def workers(url: str) -> dict[str, str]:
    """State by worker id."""
    return {one["id"]: one["state"] for one in send(url + "/workers")[1]["workers"]}


@pytest.mark.slow
def test_who_has_no_key_gets_nothing_and_joins_nothing(
    served: Served, ring: KeyRing, tmp_path: Path
) -> None:
    url = served.url()
    for key in ("", "sk-wrong", API_KEY + "x"):
        for path, body in PATHS:
            code, told = send(url + path, body, key)
            error = told["error"]
            assert (code, error["code"]) == (401, "invalid_api_key"), (path, key)
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "authentication_error"
    code, first = send(url + "/v1/completions", COMPLETION)
    assert (code, first["choices"][0]["finish_reason"]) == (200, "length")
    assert workers(url) == {"prefill-0": "ready", "decode-0": "ready"}
    (socket,) = tmp_path.glob("kvxfer-serve-*/prefill-0")
    dial = ("--listen", "tcp://127.0.0.1:0", "--prefill", f"ipc://{socket}#serve")
    with hand_started("decode", tmp_path / "s.log", *dial, *flags(ring, "stranger")) as one:
        never_joins(url, one, tmp_path / "logs" / "prefill-0.log")
    with hand_started("decode", tmp_path / "g.log", *dial, *flags(ring, "guest"),
                      "--worker-id", "guest-0") as one:  # fmt: skip
        new = {"address": one.address, "role": "decode"}
        assert send(url + "/workers", new) == (202, new)
        wait_until(lambda: workers(url).get("guest-0") == "ready", 60, "one with a right key")
        assert send(url + "/workers/guest-0/drain", {}) == (202, {"id": "guest-0"})
        assert one.process.wait(30) == 0
    assert send(url + "/v1/completions", COMPLETION)[1]["choices"] == first["choices"]
    pids = [one.pid for one in psutil.Process(served.process.pid).children(recursive=True)]
    assert len(pids) == 2
    tells_no_secret(ring, tmp_path, pids)
    served.end(signal.SIGINT)
    assert not any(map(psutil.pid_exists, pids))


def never_joins(url: str, one: HandStarted, log: Path) -> None:
    """It dials prefill, and the router dials it: under its own name, which is not known, and under
    that of a key that is allowed and which it does not have."""
    address = one.address
    assert address.endswith("#stranger")
    code, told = send(url + "/workers", {"address": address, "role": "decode"})
    assert (code, "no stranger.pub" in told["error"]["message"]) == (400, True), told
    posed = address.replace("#stranger", "#guest")
    assert send(url + "/workers", {"address": posed, "role": "decode"})[0] == 202
    wait_until(lambda: "is not allowed" in log.read_text(), 60, "prefill to refuse it")
    deadline_s = time.monotonic() + NOT_JOINED_S
    while time.monotonic() < deadline_s:
        assert one.process.poll() is None, one.text
        assert workers(url) == {"prefill-0": "ready", "decode-0": "ready", posed: "greeting"}
        time.sleep(0.2)
    assert "lane to" not in one.text
    drained = urllib.parse.quote(posed, safe="")
    assert send(f"{url}/workers/{drained}/drain", {})[0] == 202
    assert set(workers(url)) == {"prefill-0", "decode-0"}


def tells_no_secret(ring: KeyRing, directory: Path, pids: list[int]) -> None:
    """Neither logs nor what other users of this host see of a process."""
    logs = [*directory.glob("*.log"), *directory.glob("logs/*.log"), directory / "err"]
    shown = [" ".join(psutil.Process(pid).cmdline()) for pid in pids]
    told = "".join([*(one.read_text(errors="replace") for one in logs), *shown])
    secrets = [ring.secret(name).read_text().split()[1] for name in ("serve", "guest", "stranger")]
    for secret in (API_KEY, *secrets):
        assert secret not in told
    for pid in pids:
        assert API_KEY not in psutil.Process(pid).environ().values()


def test_serve_starts_nothing_with_keys_that_reach_nobody(
    ring: KeyRing, tmp_path: Path, fork_server: ForkServer
) -> None:
    """One that is not allowed, one that is not there, and one that the router has none beside."""
    config = tmp_path / "kvxfer.toml"
    config.write_text(
        f'model = "{TINY_MODEL}"\n[prefill]\nkey_file = "{ring.secret("serve")}"\n'
        f'peer_keys = "{ring.allowed}"\n'
    )
    serve = ("kvxfer.cli", "serve", "--port", "0", "--config", str(config))
    done = fork_server.run(*serve)
    done.check_one_clear_line(2, "key_file", "serve.key", "the router needs a key")
    for name, reason in (("stranger", "no stranger.pub"), ("missing", "missing.key")):
        done = fork_server.run(*serve, *flags(ring, name))
        done.check_one_clear_line(2, reason)
        assert done.out == ""
