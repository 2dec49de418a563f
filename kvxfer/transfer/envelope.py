"""A checked wrapping for what a connector tells a peer about itself.

NIXL's metadata has no checksum of its own. Measured with nixl 1.5.1: a blob cut by one byte makes
its agent's name unusable for the rest of the process; of 63 blobs with one flipped byte 18 were
accepted as good, 19 made the name unusable and one ended the loading process with SIGSEGV. So the
transport sees a payload only after magic, version, length and digest were found right. This finds
damage, not malice: who may send is the control plane's business.
"""

from __future__ import annotations

import hashlib
import struct

from kvxfer.errors import ConnectorError

_HEADER = struct.Struct("<4sHQ16s")  # magic, version, payload bytes, digest
_MAGIC = b"kvxd"
_VERSION = 1


def seal(payload: bytes) -> bytes:
    """`payload` behind a header that `unseal` checks."""
    return _HEADER.pack(_MAGIC, _VERSION, len(payload), _digest(payload)) + payload


def unseal(data: bytes) -> bytes:
    """The payload that was sealed; ConnectorError says what is wrong with any other bytes."""
    if len(data) < _HEADER.size:
        raise ConnectorError(f"description of {len(data)} bytes is shorter than its header")
    magic, version, size, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ConnectorError(f"description starts with {magic!r}, not {_MAGIC!r}")
    if version != _VERSION:
        raise ConnectorError(f"description has version {version}, this side has {_VERSION}")
    payload = bytes(data[_HEADER.size :])
    if len(payload) != size:
        raise ConnectorError(f"description holds {len(payload)} bytes instead of {size}")
    if _digest(payload) != digest:
        raise ConnectorError("description is damaged: its digest differs")
    return payload


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()
