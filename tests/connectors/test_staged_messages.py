"""What the staged way says: garbage is refused, and so is what lies elsewhere."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.staged_messages import (
    MAX_MESSAGE_BYTES,
    Ask,
    Grant,
    WireNest,
    decode,
    encode,
    from_wire,
    notifications,
)
from connectors.staged_ring import STAGING_BYTES, STAGING_SLOTS, RingShape, ring_shape
from kvxfer.errors import ConnectorError, UsageError

MIB = 1 << 20


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused_or_decode(data: bytes) -> None:
    with contextlib.suppress(ConnectorError):
        assert encode(*decode(data))


@pytest.mark.parametrize(
    ("starts", "extents", "strides", "run_bytes", "size_bytes", "blamed"),
    [
        ([0], (), (), 8, 9, "size_bytes"),
        ([-1], (), (), 8, 8, "starts"),
        ([993], (), (), 8, 8, "starts"),
        ([0], (2,), (993,), 8, 16, "starts"),
        ([0], (2,), (-1,), 8, 16, "starts"),
        ([0], (2**40, 2**40), (0, 0), 8, 8, "extents"),
        ([2**63 - 4], (), (), 8, 8, "starts"),
        ([0], (2, 2), (8,), 8, 32, "strides"),
    ],
)
def test_nests_that_lie_elsewhere_are_refused(
    starts: list[int],
    extents: tuple[int, ...],
    strides: tuple[int, ...],
    run_bytes: int,
    size_bytes: int,
    blamed: str,
) -> None:
    column = np.array(starts, dtype=np.int64).tobytes()
    with pytest.raises(ConnectorError, match=blamed):
        from_wire([WireNest(column, extents, strides, run_bytes)], size_bytes, 1000)


def test_what_is_said_in_a_turn_goes_in_few_notifications_in_order() -> None:
    large = (WireNest(bytes(64 << 10), (), (), 8),)
    asks = [Ask(1, number, 0, 8, large) for number in range(1, 8)]
    grants = [Grant(1, number, 0) for number in range(1, 500)]
    for messages, most in ((asks, 4), (grants, 1), (asks + grants, 10), (asks[:1], 1)):
        sent = list(notifications(messages))
        assert len(sent) <= most and all(len(data) <= MAX_MESSAGE_BYTES for data in sent)
        assert [one for data in sent for one in decode(data)] == messages


def test_the_ring_is_as_large_as_asked() -> None:
    assert ring_shape("cpu", {}) == RingShape(2 * MIB, 8)
    assert ring_shape("cuda:1", {}) == RingShape(64 * MIB, 4)
    assert ring_shape("cuda:1", {STAGING_SLOTS: "8"}) == RingShape(32 * MIB, 8)
    assert ring_shape("cpu", {STAGING_BYTES: "100000"}) == RingShape(4096, 8)
    for name, bad in (
        *((STAGING_BYTES, text) for text in ("-1", "1e9", "0", "65535", "x", str(1 << 41), "²")),
        *((STAGING_SLOTS, text) for text in ("0", "4097", "many")),
    ):
        with pytest.raises(UsageError, match=name):
            ring_shape("cpu", {name: bad})
