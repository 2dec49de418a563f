"""Keys from the command line: made, asked for, and used by real workers and a router."""

from __future__ import annotations

import shutil
import socket
import stat
import sys
from pathlib import Path

import pytest
from support.by_hand import hand_started
from support.commands import KVXFER, TINY_MODEL, Finished, run

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


def test_keygen_says_what_it_made_and_overwrites_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "keys"
    done = run(*KVXFER, "keygen", str(directory), "decode-0")
    made = [directory / "decode-0.key", directory / "decode-0.pub"]
    assert (done.code, done.err, done.out.split()) == (0, "", [str(path) for path in made])
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o600, 0o600]
    before = [path.read_bytes() for path in made]
    again = run(*KVXFER, "keygen", str(directory), "decode-0")
    again.check_one_clear_line(2, "decode-0.key", "exists")
    assert [path.read_bytes() for path in made] == before


def worker(role: str, *options: str) -> Finished:
    return run(sys.executable, "-m", role, "--model", str(TINY_MODEL), *options)


def test_what_needs_keys_is_refused_in_one_line(tmp_path: Path) -> None:
    """By each program, before it loads anything, naming the field and the value."""
    far, missing = "tcp://10.1.2.3:5601", str(tmp_path / "x.key")
    worker("prefill", "--listen", far).check_one_clear_line(2, "listen", far, "key_file")
    worker("decode", "--prefill", far).check_one_clear_line(2, "prefill", far, "key_file")
    router = ("complete", "--model", str(TINY_MODEL), "--prompt", "x", "--decode", far)
    run(*KVXFER, *router).check_one_clear_line(2, "decode", far, "key_file")
    both = ("--key-file", missing, "--peer-keys", str(tmp_path))
    worker("prefill", *both).check_one_clear_line(2, "key_file", missing, "No such file")
    with_keys = run(*KVXFER, *router, *both)
    with_keys.check_one_clear_line(2, "key_file", missing, "No such file")


def own_address() -> str:
    """One of this host's that is not loopback; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


@pytest.mark.slow
def test_workers_with_keys_serve_on_an_address_that_others_reach(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir(mode=0o700)
    options: dict[str, tuple[str, ...]] = {}
    for name in ("prefill-0", "decode-0", "router-0", "stranger-0"):
        own = tmp_path / name
        assert run(*KVXFER, "keygen", str(own), name).code == 0
        if name != "stranger-0":
            shutil.copy2(own / f"{name}.pub", allowed)
        options[name] = ("--key-file", str(own / f"{name}.key"), "--peer-keys", str(allowed))
    listen = ("--listen", f"tcp://{own_address()}:0")
    with hand_started("prefill", tmp_path / "p.log", *listen, *options["prefill-0"]) as prefill:
        dial = ("--prefill", prefill.address)
        assert prefill.address.endswith("#prefill-0")
        log = tmp_path / "d.log"
        with hand_started("decode", log, *listen, *dial, *options["decode-0"]) as decode:
            decode.wait_for("is ready, lane")
            ask = (*KVXFER, "complete", "--model", str(TINY_MODEL), "--decode", decode.address)
            ask = (*ask, "--prompt", "To be", "--max-new-tokens", "5")
            answer = run(*ask, *options["router-0"])
            assert (answer.code, answer.err) == (0, "")
            assert answer.out.strip()
            refused = run(*ask, *options["stranger-0"], "--connect-timeout-s", "2")
            refused.check_one_clear_line(1, "no answer")
            decode.wait_for("is not allowed")
            assert run(*ask, *options["router-0"]).out == answer.out
        for secret in tmp_path.glob("*/*.key"):
            assert secret.read_text().split()[1] not in prefill.text + log.read_text()
