"""Prefill and decode in two network namespaces, as on two hosts: KV over TCP, control over Unix
sockets, and what comes out is what a single process gives.

They are started as a user starts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.namespaces import LINK_MBIT, Apart, apart, skip_unless_permitted

LANES = ("nixl/push", "nixl/pull")

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


@pytest.fixture(scope="module", autouse=True)
def permitted() -> None:
    skip_unless_permitted()


@pytest.mark.slow
@pytest.mark.parametrize("lane", ["auto", "pull", "push"])
def test_equals_a_single_process_while_the_cache_grows(lane: str, tmp_path: Path) -> None:
    with apart(tmp_path, lane) as pair:
        if lane == "auto":
            check_trial(pair)
        sent_before = pair.namespaces.sent_bytes("left")
        result = pair.demo().run()
        sent = pair.namespaces.sent_bytes("left") - sent_before
    assert result.lane in LANES
    assert lane in ("auto", result.lane.removeprefix("nixl/"))
    assert result.tokens_equal
    assert result.kv_equal
    assert result.grew
    assert result.growth is not None
    assert result.growth.start_ns < result.growth.generation_ns < result.growth.end_ns
    kv_bytes = sum(request.bytes for request in result.requests)
    assert kv_bytes > 0
    assert sent >= kv_bytes, "it took another way than the link"
    for account in result.after.values():
        assert account["blocks_used"] == account["blocks_quarantined"] == 0
        assert account["registered_bytes"] == account["committed_bytes"]


def check_trial(pair: Apart) -> None:
    """Pushing was tried when the workers met, over the link and nothing quicker; reading was not,
    since over TCP it may cost the owner its life."""
    values = pair.cluster.router.status(pair.cluster.decode).values
    assert values["lane prefill-0"] == "nixl/push"
    assert 0 < float(values["lane_gbps prefill-0"]) < LINK_MBIT / 8e3
    assert "nixl/pull" not in pair.log("decode")
    modes = {path.name: path.stat().st_mode & 0o777 for path in pair.sockets.iterdir()}
    assert modes == {"prefill": 0o600, "decode": 0o600}
