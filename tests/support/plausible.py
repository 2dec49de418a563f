"""One of each control message, with values that a handler may find right."""

from __future__ import annotations

from typing import Any, get_args

from kvxfer.control.cache_messages import Shrink
from kvxfer.control.lane_messages import LanePush, LaneTrial
from kvxfer.control.messages import Grant, Hello, Lease, Message, Ready, Welcome
from kvxfer.control.router_messages import Finished, Sampling, TransferStats
from kvxfer.transfer.regions import Region

PLAUSIBLE: dict[str, Any] = {
    **dict.fromkeys(("request_id", "grant_id", "lease_id"), "g"),
    "trial_id": "t",
    "lane": "loopback/push",
    "proven": ["loopback/push"],
    "gbps": 1.0,
    "num_tokens": 18,
    "num_cached_tokens": 0,
    "retry_after_s": 0.1,
    "num_layers": 2,
    "num_ranks": 1,
    "index": 0,
    "token": 5,
    "first_token": 5,
    "tokens": list(range(18)),
    "max_new_tokens": 4,
    "sampling": Sampling(),
    "prefill": "",
    "stop_token_ids": [],
    "verify": True,
    "wants_digest": False,
    "digest": None,
    "blocks": [1],
    "grant": Grant("g", [[1, 2, 3, 4, 5]], 1.0, 0),
    "lease": Lease("g", [[1, 2, 3, 4, 5]], 1.0),
    "start": 0,
    "stop": 18,
    "layers": [(0, 2)],
    "final": True,
    "transfer": TransferStats(),
    "tokens_read": 0,
    "layers_read": [],
    "stretch_end": 0,
    "elapsed_ns": 100,
    "epoch": 1,
    "generation": 1,
    "regions": [Region(0, 4096)],
    "descriptions": [b""],
    "reason": "length",
    "error": "",
    "kv_digests": ["00"],
    "num_blocks": [4],
    "timeout_s": 0.1,
    "request": "Shrink",
    "problem": "",
    "is_sleeping": False,
    "committed_bytes": 4096,
    "tombstone_bytes": 0,
    "pinned_bytes": 0,
    "worker_id": "w",
    "addresses": ["tcp://127.0.0.1:1"],
    "values": {"a": 1, "b": "c"},
    "field": "model",
    "ours": "a",
    "theirs": "b",
}
"""Values of messages' fields that a handler may find right."""


def example(kind: type, **others: Any) -> Any:
    """A message of `kind`. KeyError for a field that PLAUSIBLE does not know: teach it."""
    known = PLAUSIBLE | others
    return kind(**{name: known[name] for name in kind.__struct_fields__})  # type: ignore


def examples() -> list[Any]:
    """One of each message at the least: some are seldom said, or by some lanes only."""
    special: dict[Any, dict[str, Any]] = {LaneTrial: {"num_tokens": 4}, LanePush: {"num_tokens": 4}}
    special |= {Shrink: {"num_blocks": [2]}, Finished: {"num_blocks": 5}}
    kinds = [kind for kind in get_args(Message) if kind not in (Hello, Welcome)]
    made = [example(kind, **special.get(kind, {})) for kind in kinds]
    return [*made, example(Ready, stop=8, layers=[(0, 1)], final=False)]
