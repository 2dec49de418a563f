"""Options of the connector: vLLM's kv_connector_extra_config, and the environment for the keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.control.addresses import IPC, check_address
from kvxfer.control.auth import Keys
from kvxfer.errors import UsageError
from kvxfer.transfer.connector import check_connectors

KEY_FILE, PEER_KEYS = "KVXFER_KEY_FILE", "KVXFER_PEER_KEYS"
"""In the environment: those of the options of that name which are not given."""

RENAMED = {"kv_lease_duration": "lease_timeout_s", "backends": "connectors"}
"""Options of vLLM's NixlConnector that have another name here."""


@dataclass(frozen=True, slots=True)
class Options:
    """Each field is a key of kv_connector_extra_config; no other is taken."""

    listen: str = "tcp://127.0.0.1:0"
    """Where a producer's ranks are dialled: each adds its rank to the port; 0: any free port."""
    key_file: str = ""
    peer_keys: str = ""
    connectors: str = "nixl"
    """Modules of connectors/ that may move KV, comma-separated."""
    kv_cache_layout: str = ""
    """One of the six, asked of vLLM; '': any that its attention backend prefers."""
    lease_timeout_s: float = 30.0
    """How long KV waits for a consumer to claim it."""
    peer_timeout_s: float = 5.0
    """How long a peer may be silent before it counts as dead."""
    claim_timeout_s: float = 30.0
    """How long a producer may take to answer a claim."""

    @classmethod
    def resolve(cls, extra: Mapping[str, object], environ: Mapping[str, str]) -> Options:
        """Raises UsageError for an unknown key and for a value that cannot be."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        given: dict[str, object] = {}
        for name, value in extra.items():
            if name not in known:
                reason = f"is no option of KvxferConnector: {', '.join(known)}"
                if name in RENAMED:
                    reason = f"is called {RENAMED[name]} here"
                raise UsageError("kv_connector_extra_config", name, reason)
            given[name] = _checked(name, value, known[name].default)
        for name, variable in (("key_file", KEY_FILE), ("peer_keys", PEER_KEYS)):
            given.setdefault(name, environ.get(variable, ""))
        options = cls(**given)  # type: ignore[arg-type]
        check_connectors(options.connectors)
        if options.kv_cache_layout:
            KVCacheLayout.parse("kv_cache_layout", options.kv_cache_layout)
        return options

    def keys(self) -> Keys | None:
        """Raises UsageError for keys that are not as they should be."""
        return Keys.load(_path(self.key_file), _path(self.peer_keys))

    def address(self, offset: int) -> str:
        """Where the rank of this `offset` listens. Raises UsageError for what is no such address,
        as without keys any but loopback is none."""
        has_keys = bool(self.key_file)
        check_address("listen", self.listen, has_keys=has_keys, binds=True)
        if self.listen.startswith(IPC):
            return f"{self.listen}.{offset}" if offset else self.listen
        host, _, port = self.listen.rpartition(":")
        mine = int(port) + offset if int(port) else 0
        if mine >= 1 << 16:
            raise UsageError("listen", self.listen, f"leaves no port for rank {offset}")
        return f"{host}:{mine}"


def _checked(name: str, value: object, default: object) -> object:
    if isinstance(default, float):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(name, value, "must be a number of seconds")
        if not (0 < value < math.inf):
            raise UsageError(name, value, "must be more than 0 and finite")
        return float(value)
    if not isinstance(value, str):
        raise UsageError(name, value, "must be a string")
    return value


def _path(text: str) -> Path | None:
    return Path(text) if text else None
