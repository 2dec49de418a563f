"""Several hosts, as deploy/README.md has them started: network namespaces on a switch stand for
hosts. Control goes by TCP with keys, KV by NIXL over TCP, and what comes out is what a single
process gives. Each host has networks besides that lead nowhere."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import TINY_MODEL
from support.namespaces import skip_unless_permitted
from support.several_hosts import (
    CHUNK,
    MODEL,
    ROUTER,
    Answer,
    Placed,
    SeveralHosts,
    commands,
)
from support.single_process import SingleProcess

from kvxfer.model.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

REQUEST_TIMEOUT_S = 20
"""Long enough for a slow link; what waits for one that was cut ends after it."""
TOKEN_BYTES = 4096
"""Of KV of the bundled model."""
THREE = [Placed("prefill-0"), Placed("decode-0")]
FOUR = [
    Placed("prefill-0"),
    Placed("prefill-1", is_advertised=True),
    Placed("decode-0"),
    Placed("decode-1"),
]


@pytest.fixture(scope="module")
def single() -> Iterator[SingleProcess]:
    alone = SingleProcess(CHUNK)
    yield alone
    alone.runner.close()


@pytest.fixture(scope="module")
def text() -> list[int]:
    return Tokenizer.load(TINY_MODEL).encode((TINY_MODEL / "excerpt.txt").read_text())


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeveralHosts]:
    """Prefill, decode and the router on a host each, with frames of 1,500 bytes."""
    skip_unless_permitted()
    directory = tmp_path_factory.mktemp("hosts")
    with SeveralHosts(
        directory, THREE, router_on="router-0", request_timeout_s=REQUEST_TIMEOUT_S
    ) as service:
        yield service
        service.check_logs()


def test_the_commands_of_the_readme_serve_a_prompt(three: SeveralHosts) -> None:
    """The last one too, on another host than the router's."""
    if shutil.which("curl") is None:
        pytest.skip("curl not found")
    command = three.in_shell("decode-0", commands()["anywhere 1"].replace(ROUTER, three.router_ip))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout)
    assert answer["usage"]["completion_tokens"] == 16, done
    assert answer["model"] == MODEL


def test_tokens_and_kv_are_those_of_a_single_process(
    three: SeveralHosts, single: SingleProcess, text: list[int]
) -> None:
    before = three.hosts.sent_bytes("prefill-0")
    lengths = (1, 31, 32, 33, 200, 500)
    asked = [three.ask(text[97 * at :][:length]) for at, length in enumerate(lengths)]
    for one in asked:
        one.result(60).check(single)
    sent = three.hosts.sent_bytes("prefill-0") - before
    assert sent >= sum(lengths) * TOKEN_BYTES, "KV took another way than the link"


def test_the_cache_grows_in_the_middle_of_transfers(
    three: SeveralHosts, single: SingleProcess, text: list[int]
) -> None:
    """Over a link so slow that the first prompt's KV is on it while others make the cache grow."""
    three.hosts.shape(16)
    first = three.ask(text[:1000], 1)
    three.until(
        lambda: three.status()["decode-0"]["cache"]["blocks_used"] > 0, 10, "the first one's blocks"
    )
    before = generation(three)
    others = [three.ask(text[1000 * at :][:1000], 4) for at in (1, 2, 3)]
    three.until(lambda: generation(three) > before, 20, "growth")
    assert not first.done(), "it grew in the middle of a transfer"
    for one in [first, *others]:
        one.result(60).check(single)
    three.hosts.shape(1000)
    three.until(three.is_idle, 20, "all blocks are free")


def generation(service: SeveralHosts) -> int:
    return int(service.status()["decode-0"]["cache"]["generation"])


@pytest.mark.parametrize("cut", ["decode-0", "prefill-0"])
def test_a_link_is_cut_and_healed(
    cut: str, three: SeveralHosts, single: SingleProcess, text: list[int]
) -> None:
    """Requests under way end in time, with a reason, and nobody is started again."""
    three.hosts.shape(16)
    asked = [three.ask(text[500 * at :][:800], 4) for at in range(4)]
    sent = three.hosts.sent_bytes("prefill-0")
    three.until(
        lambda: three.hosts.sent_bytes("prefill-0") > sent + 400_000, 20, "KV is on its way"
    )
    with three.hosts.cut(cut):
        cut_s = time.monotonic()
        answers = [one.result(60) for one in asked]
    three.hosts.shape(1000)
    assert max(one.ended_s for one in answers) - cut_s < REQUEST_TIMEOUT_S + 5
    errors = {one.error for one in answers if one.error}
    assert any("nothing heard for 3 s" in error and cut in error for error in errors), errors
    for one in answers:
        if not one.error:
            one.check(single)
    three.until(lambda: not three.ask(text[:300]).result(60).error, 15, "a new one is served")
    three.ask(text[:700]).result(60).check(single)
    three.until(three.is_idle, 40, "all blocks are free")


@pytest.mark.parametrize("percent", [3])
def test_a_link_that_loses_packets_is_slower_and_never_wrong(
    percent: int, three: SeveralHosts, single: SingleProcess, text: list[int]
) -> None:
    if shutil.which("nft") is None:
        pytest.skip("nft not found (nftables)")
    with three.hosts.losing(percent):
        asked = [three.ask(text[300 * at :][:600], 4) for at in range(8)]
        for one in asked:
            one.result(60).check(single)
        assert three.hosts.num_lost() > 0
    three.until(three.is_idle, 40, "all blocks are free")


def test_a_slow_link_costs_the_time_that_it_needs(
    three: SeveralHosts, single: SingleProcess, text: list[int]
) -> None:
    took = {}
    for mbit in (1000, 8):
        three.hosts.shape(mbit)
        answer = three.ask(text[:600], 2).result(60)
        answer.check(single)
        took[mbit] = answer.ended_s - answer.began_s
    three.hosts.shape(1000)
    least_s = 600 * TOKEN_BYTES * 8 / 8e6
    assert took[1000] < least_s * 0.9 < took[8], took


def test_four_hosts_with_long_frames_use_all_pairs(
    tmp_path: Path, single: SingleProcess, text: list[int]
) -> None:
    """One of them binds a wildcard address and advertises another; the router is on one of them."""
    skip_unless_permitted()
    chance = random.Random(8)
    with SeveralHosts(tmp_path, FOUR, router_on="prefill-0", mtu=9000) as service:
        assert set(service.lanes()) == {"nixl/push"}
        assert "listens on tcp://10.0.0.2:5601#prefill-1" in service.log("prefill-1")
        asked = []
        for at in range(24):
            length = chance.randint(200, 800)
            asked.append(service.ask(text[50 * at :][:length], 4))
        answers: list[Answer] = [one.result(130) for one in asked]
        for one in answers:
            one.check(single)
        assert {one.pair for one in answers} == {
            (f"prefill-{p}", f"decode-{d}") for p in range(2) for d in range(2)
        }
        service.until(service.is_idle, 20, "all blocks are free")
        service.check_logs()
