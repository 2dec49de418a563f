"""GPU memory between two network namespaces: over TCP, by way of the host (UCX's cuda_copy)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.namespaces import apart, skip_unless_permitted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.usefixtures("leaves_nothing_behind"),
]


@pytest.mark.parametrize("lane", ["push", "pull"])
def test_equals_a_single_process_while_the_cache_grows(lane: str, tmp_path: Path) -> None:
    skip_unless_permitted()
    with apart(tmp_path, lane, "cuda:0") as pair:
        sent_before = pair.namespaces.sent_bytes("left")
        result = pair.demo().run()
        sent = pair.namespaces.sent_bytes("left") - sent_before
    assert result.lane == f"nixl/{lane}"
    assert result.tokens_equal
    assert result.kv_equal
    assert result.grew
    assert result.grew_in_flight
    assert sent >= sum(request.bytes for request in result.requests) > 0
