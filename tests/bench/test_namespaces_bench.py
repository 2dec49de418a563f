"""Namespaces that leave nothing behind, and what is measured over the link between them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import KVXFER, ROOT, run
from support.namespaces import skip_unless_permitted
from support.running import wait_until

from kvxfer.bench import netns
from kvxfer.bench.namespaces import NamespacesOptions, run_namespaces
from kvxfer.bench.namespaces_link import PlainTcp
from kvxfer.bench.netns import Namespaces, why_not
from kvxfer.errors import KvxferError, UsageError

HOLD = """
from kvxfer.bench.netns import Namespaces
import os, time
with Namespaces() as made:
    print(*(os.readlink(made.paths(side)["net"]) for side in ("left", "right")), flush=True)
    time.sleep(60)
"""


def spaces() -> set[str]:
    """Network namespaces that some process is in."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found.add(os.readlink(process / "ns" / "net"))  # noqa: PTH115
        except OSError:
            continue
    return found


@pytest.fixture
def joined() -> Iterator[Namespaces]:
    skip_unless_permitted()
    with Namespaces() as made:
        yield made


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_namespaces_go_however_their_owner_ends(number: signal.Signals) -> None:
    skip_unless_permitted()
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert owner.stdout is not None
        made = set(owner.stdout.readline().decode().split())
        assert len(made) == 2
        assert made <= spaces()
        owner.send_signal(number)
        assert owner.wait(20) != 0
    finally:
        owner.kill()
        owner.communicate(timeout=10)
    wait_until(lambda: not made & spaces(), 10, "the end of the namespaces")


def test_an_error_inside_leaves_nothing_either() -> None:
    skip_unless_permitted()
    with pytest.raises(ZeroDivisionError), Namespaces() as joined:
        made = {os.readlink(joined.paths(side)["net"]) for side in ("left", "right")}  # noqa: PTH115
        raise ZeroDivisionError
    wait_until(lambda: not made & spaces(), 10, "the end of the namespaces")


def test_the_link_has_the_rate_that_it_was_given_and_counts_what_it_carries(
    joined: Namespaces,
) -> None:
    joined.shape(200)
    size = 5_000_000
    with PlainTcp(joined) as tcp:
        tcp.run(size // 10)
        before = joined.sent_bytes("left")
        seconds = tcp.run(size)
        sent = joined.sent_bytes("left") - before
    assert size < sent < 1.2 * size
    assert size / seconds < 25e6  # twice as much under load would still be wrong


def test_a_command_enters_with_its_own_process(joined: Namespaces) -> None:
    code = (
        "import os, socket; print(os.getpid(), os.environ['UCX_TLS'], os.listdir('/sys/class/net'))"
    )
    command = [*joined.entering("right"), sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(timeout=20)
    assert out.split()[:2] == [str(process.pid), "tcp,cuda_copy"]
    assert netns.DEVICE in out
    own = {name for _, name in socket.if_nameindex()}
    assert netns.DEVICE not in own


def test_a_shaping_that_the_kernel_refuses_is_one_clear_line(joined: Namespaces) -> None:
    with pytest.raises(KvxferError, match="tc qdisc") as error:
        joined.shape(0)
    assert len(str(error.value).splitlines()) == 1


def test_without_the_tools_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "ip, nsenter, tc, unshare not found" in why_not()
    with pytest.raises(KvxferError, match="no network namespaces here: ip"):
        run_namespaces(NamespacesOptions())


@pytest.mark.parametrize(
    ("field", "value"), [("mbit", 0), ("mib", 1), ("runs", 0), ("warm_up", -1)]
)
def test_options_that_make_no_sense_are_refused(field: str, value: int) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(UsageError, match=field):
        run_namespaces(NamespacesOptions(**options))


@pytest.mark.slow
def test_the_whole_bench_at_a_small_size(tmp_path: Path) -> None:
    skip_unless_permitted()
    target = tmp_path / "figures.json"
    done = run(
        *KVXFER, "bench", "namespaces", "--mib", "8", "--runs", "1", "--json", str(target),
        timeout_s=400,
    )  # fmt: skip
    assert done.code in (0, 1), done  # the bars are for a machine that does nothing else
    assert "Traceback" not in done.err
    text = target.read_text()
    for metric in ("plain TCP", "NIXL push", "NIXL pull", "by push", "by pull"):
        assert metric in text
