"""vLLM's KV connectors that are compared: how each is configured, and how it tells what it did."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["kv_producer", "kv_consumer", "kv_both"]


@dataclass(frozen=True, slots=True)
class VllmConnector:
    """One of them."""

    name: str
    """As users say it."""
    class_name: str
    metrics: str
    """What its metrics' names begin with."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of --kv-transfer-config, besides class and role."""
    port_variable: str = ""
    """The environment variable that has the port on which an engine tells others of itself; ''
    where the connector finds one itself."""

    def transfer_config(self, role: Role) -> str:
        """For `--kv-transfer-config`. KV that did not arrive is computed again."""
        config = {"kv_connector": self.class_name, "kv_role": role, **self.settings}
        return json.dumps({**config, "kv_load_failure_policy": "recompute"})


CONNECTORS = {
    one.name: one
    for one in (
        VllmConnector(
            "kvxfer",
            "KvxferConnector",
            "vllm:kvxfer_",
            {"kv_connector_module_path": "connectors.vllm"},
        ),
        VllmConnector(
            "nixl",
            "NixlConnector",
            "vllm:nixl_",
            {"kv_buffer_device": "cpu"},
            port_variable="VLLM_NIXL_SIDE_CHANNEL_PORT",
        ),
    )
}
