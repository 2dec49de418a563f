"""The commands of `kvxfer`: what is wrong ends with 2, in one line, before anything starts."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import KVXFER, TINY_MODEL, run

from kvxfer import cli
from kvxfer.command import run_app

MODEL = ("--model", str(TINY_MODEL))
ROUTER = (*MODEL, "--prefill", "tcp://127.0.0.1:1", "--decode", "tcp://127.0.0.1:2")


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """What commands set up for their own process is taken back."""
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    yield
    root.handlers[:], root.level = before


@pytest.fixture
def kvxfer(monkeypatch, capsys):
    """The exit code of a command line, and what it said on stderr. A worker is never begun: it
    would take the place of this process."""

    def not_here(*command: object) -> None:
        raise AssertionError(f"{command} was begun")

    monkeypatch.setattr("os.execv", not_here)

    def asked(*arguments):
        monkeypatch.setattr("sys.argv", ["kvxfer", *arguments])
        code = run_app(cli.app, arguments)
        out, err = capsys.readouterr()
        assert out == ""
        return code, err

    return asked


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


NEAR, FAR = "tcp://127.0.0.1:5", "tcp://10.1.2.3:5"
NO_KEY = ("--key-file", "/nowhere/x.key", "--peer-keys", "/nowhere")
WRONG = [
    (("serve",), ("--model",)),
    (("serve", "--model", "/nowhere"), ("model", "/nowhere", "not a directory")),
    (("serve", *MODEL, "--prefill", "0"), ("prefill", "0", "at least 1", "between 1 and")),
    (("serve", *MODEL, "--prefill", "two"), ("prefill", "two")),
    (("serve", *MODEL, "--decode", "1000"), ("decode", "1000")),
    (("serve", *MODEL, "--decode", "1.5"), ("decode", "1.5", "whole")),
    (("serve", *MODEL, "--port", "70000"), ("port", "70000")),
    (("serve", *MODEL, "--host", "no such host"), ("host", "no such host")),
    (("serve", *MODEL, "--block-size", "0"), ("block_size", "0")),
    (("serve", *MODEL, "--listen", "tcp://127.0.0.1:5"), ("listen", "tcp://127.0.0.1:5")),
    (("serve", *MODEL, "--chat-template", "/nowhere"), ("chat_template", "/nowhere")),
    (("serve", *MODEL, "--max-model-len", "999999"), ("max_model_len", "999999")),
    (("serve", *MODEL, "--log-dir", "/proc/x"), ("log_dir", "/proc/x")),
    (("serve", *MODEL, "--blok-size", "4"), ("--blok-size", "--block-size")),
    (("serve", *MODEL, "--config", "/nowhere"), ("config", "/nowhere")),
    (("router", *MODEL), ("--prefill",)),
    (("router", *ROUTER, "--port", "-1"), ("port", "-1")),
    (("router", *ROUTER, "--api-key", "two words"), ("api_key",)),
    (("router", *ROUTER, "--decode", "tcp://10.1.2.3:5"), ("decode", "10.1.2.3", "key_file")),
    (("router", *MODEL, "--decode", NEAR, "--prefill", FAR), ("prefill", FAR, "key_file")),
    (("router", *ROUTER, *NO_KEY), ("key_file", "/nowhere/x.key", "No such file")),
    (("router", *ROUTER, *NO_KEY[:2]), ("key_file", "peer_keys")),
    (("router", *ROUTER, "--decode", f"{NEAR}#it"), ("decode", f"{NEAR}#it", "key_file")),
    (("serve", *MODEL, *NO_KEY), ("key_file", "/nowhere/x.key", "No such file")),
    (("serve", *MODEL, *NO_KEY[2:]), ("peer_keys", "key_file")),
    (("router", *ROUTER, "--shutdown-timeout-s", "-1"), ("shutdown_timeout_s", "-1")),
    (("prefill", *MODEL, "--no-such"), ("--no-such",)),
    (("decode", "--prefill", "tcp://127.0.0.1:1"), ("--model",)),
    (("status", "--url", "localhost"), ("url", "localhost")),
    (("complete", *MODEL, "--decode", "x", "--top-p", "0"), ("top_p", "0")),
]


@pytest.mark.parametrize(("arguments", "mentioned"), WRONG)
def test_what_is_wrong_is_one_line(kvxfer, arguments, mentioned):
    code, err = kvxfer(*arguments)
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("kvxfer: error: ")
    assert any(word in err for word in mentioned[2:] or mentioned)
    assert all(word in err for word in mentioned[:2])


def test_a_port_in_use_is_told_before_a_worker_starts(kvxfer, taken_port):
    code, err = kvxfer("serve", *MODEL, "--port", str(taken_port))
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert str(taken_port) in last
    assert "in use" in last


def test_a_table_of_one_role_is_checked_by_serve(kvxfer, tmp_path):
    (tmp_path / "f").write_text("[decode]\nkv_low_watermark = 2.0\n")
    code, err = kvxfer("serve", *MODEL, "--config", str(tmp_path / "f"))
    assert (code, "kv_low_watermark" in err, err.count("\n")) == (2, True, 1)


def test_kvxfer_prefill_goes_on_as_the_worker(tmp_path: Path) -> None:
    """What it is told reaches the worker, of which the core knows nothing."""
    (tmp_path / "f").write_text("[prefill]\nblock_size = 0\n")
    done = run(*KVXFER, "prefill", *MODEL, "--config", str(tmp_path / "f"))
    assert done.code == 2
    assert done.err.strip() == "prefill: error: block_size: 0: must be at least 1"
