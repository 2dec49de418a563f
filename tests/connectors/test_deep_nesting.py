"""Bytes of a peer that nest without end are refused like any others: msgspec reads by recursion,
what it skips too, and then raises RecursionError, which is no error of its own."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.wrong_values import WrongValues

from connectors import handover_socket, staged_link, staged_messages
from connectors.handover_socket import Open, Refused
from connectors.peer_import import Reach
from connectors.staged_messages import Ping, Ring
from kvxfer.errors import ConnectorError
from kvxfer.transfer.envelope import seal
from kvxfer.transfer.reach import Description, RemotePeer
from kvxfer.transfer.regions import RegionSet

ROOT = Path(__file__).parent.parent.parent
REMOTE = RemotePeer("agent", "cpu", 0, RegionSet())
REACH = Reach(host="h", place="p", socket_name="s", size_bytes=1, granularity=1, chunks=[])
TOLD = Description(agent="agent", device="cpu", regions=[])
DECODERS: dict[str, tuple[Any, Callable[[bytes], object]]] = {
    "an importer's frame": (
        Open(b"", "a"), lambda data: handover_socket._decoded(handover_socket._TO_OWNER, data)
    ),
    "an owner's frame": (
        Refused("x"), lambda data: handover_socket._decoded(handover_socket._TO_IMPORTER, data)
    ),
    "an owner's description": (REACH, lambda data: Reach.of(data, REMOTE)),
    "a description": (TOLD, lambda data: Description.from_bytes(seal(data))),
    "a ring": (Ring("a", "cpu", 1, 1, 1), lambda data: staged_link.unseal_ring(seal(data))),
    "a notification": (Ping(1), lambda data: staged_messages.decode(b"\x91" + data)),
}  # fmt: skip


@pytest.mark.parametrize("decoder", DECODERS)
def test_what_is_nested_too_deep_is_refused(decoder: str) -> None:
    real, decode = DECODERS[decoder]
    data = msgspec.msgpack.encode(real)
    decode(data)
    with pytest.raises(ConnectorError):
        decode(WrongValues(1).deeper(data))


def test_whoever_refuses_what_does_not_decode_refuses_what_is_nested_too_deep() -> None:
    """In the rooms whose bytes come from peers."""
    found = []
    for room in ("connectors", "kvxfer/control", "kvxfer/transfer", "kvxfer/worker"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ExceptHandler) and node.type is not None:
                    caught = ast.unparse(node.type)
                    if "MsgspecError" in caught and "RecursionError" not in caught:
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
