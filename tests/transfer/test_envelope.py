"""The envelope lets nothing through but what was sealed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConnectorError
from kvxfer.transfer.envelope import seal, unseal
from kvxfer.transfer.reach import Description


@given(st.binary(max_size=2000))
def test_roundtrip(payload: bytes) -> None:
    assert unseal(seal(payload)) == payload


@given(st.binary(max_size=60))
def test_every_truncation_is_refused(payload: bytes) -> None:
    sealed = seal(payload)
    for length in range(len(sealed)):
        with pytest.raises(ConnectorError):
            unseal(sealed[:length])


@given(st.binary(max_size=60), st.integers(1, 255))
def test_every_changed_byte_is_refused(payload: bytes, change: int) -> None:
    sealed = bytearray(seal(payload))
    for position in range(len(sealed)):
        sealed[position] ^= change
        with pytest.raises(ConnectorError):
            unseal(bytes(sealed))
        sealed[position] ^= change
    assert unseal(bytes(sealed)) == payload


@given(st.binary(max_size=60), st.binary(min_size=1, max_size=60))
def test_trailing_bytes_are_refused(payload: bytes, tail: bytes) -> None:
    with pytest.raises(ConnectorError):
        unseal(seal(payload) + tail)


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ConnectorError):
        unseal(data)


@given(
    st.text(min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)), max_size=5),
    st.binary(max_size=100),
)
def test_description_roundtrip(
    agent: str, regions: list[tuple[int, int]], transport: bytes
) -> None:
    told = Description(agent=agent, device="cpu", regions=regions, transport=transport)
    assert Description.from_bytes(told.to_bytes()) == told


@pytest.mark.parametrize(
    "content",
    [
        {"agent": "", "device": "cpu", "regions": []},
        {"agent": "a" * 257, "device": "cpu", "regions": []},
        {"agent": "a", "device": "cpu", "regions": [(0, -1)]},
        {"agent": "a", "device": "cpu", "regions": [(0, 2**63)]},
        {"agent": "a", "device": "cpu"},
        [1, 2],
    ],
)
def test_a_sealed_payload_of_another_shape_is_refused(content: object) -> None:
    with pytest.raises(ConnectorError, match="does not decode"):
        Description.from_bytes(seal(msgspec.msgpack.encode(content)))
