"""The README's example for engine authors: its two scripts, as two processes, over real NIXL."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import pytest
from support.commands import ROOT

SCRIPT = "kvxfer.transfer.examples."
PROMPT_BYTES = 512 * 8 * 128 * 2 * 4
"""Tokens × heads × content × bytes of bfloat16 × layers."""


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def run_both(sender: list[str], receiver: list[str]) -> list[tuple[int, list[str], str]]:
    """Exit code, lines and errors of the sender and of the receiver."""
    address = free_address()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", SCRIPT + name, "--address", address, *options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, options in (("sender", sender), ("receiver", receiver))
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=10)
    return [
        (process.returncode, out.splitlines(), err)
        for process, (out, err) in zip(processes, outputs, strict=True)
    ]


@pytest.mark.parametrize(
    ("options", "push", "pull"),
    [
        ([], "nixl/push", "peer/pull"),
        pytest.param(["--connectors", "nixl"], "nixl/push", "nixl/pull", marks=pytest.mark.slow),
    ],
)
def test_kv_arrives_by_push_and_pull_with_growth_in_the_middle(options, push, pull):
    sender, receiver = run_both(options, options)
    for code, _, err in (sender, receiver):
        assert (code, err) == (0, "")
    assert sender[1][1:] == [
        f"sender: pushed {PROMPT_BYTES // 2} bytes of prompt {prompt} by {push}"
        for prompt in (0, 0, 1, 1)
    ]
    lines = receiver[1][1:]
    grown = re.fullmatch(r"receiver: grew from (\d+) to (\d+) blocks", lines.pop(1))
    assert grown is not None
    assert (int(grown[1]), int(grown[2])) == (17, 49)
    released = re.fullmatch(r"receiver: gave (\d+) bytes back", lines.pop())
    assert released is not None
    assert int(released[1]) >= PROMPT_BYTES
    assert lines == [
        "receiver: prompt 0: every byte is right",
        "receiver: prompt 1: every byte is right",
        "receiver: prompt 0: every byte is right",
        f"receiver: pulled {PROMPT_BYTES} bytes of prompt 2 by {pull}",
        "receiver: prompt 2: every byte is right",
    ]


@pytest.mark.slow
def test_sides_that_do_not_fit_say_so_in_a_line():
    for code, _, err in run_both(["--block-size", "24"], []):
        assert code == 1
        assert "Traceback" not in err
        last = err.splitlines()[-1]
        assert "block_size differs" in last or "hung up" in last
