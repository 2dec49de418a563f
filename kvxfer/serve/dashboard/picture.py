"""What the page draws, as parts that change one by one: a watcher is sent those that did.

| part                     | what it holds                                                |
| ---                      | ---                                                          |
| ADDRESS/who              | worker id, role, whether it is there                         |
| ADDRESS/cache            | ranges, blocks and the account of its cache                  |
| ADDRESS/lanes            | its peers, each with its lane and the measured rate          |
| ADDRESS/transfers        | the newest of those that it started                          |
| ADDRESS/requests         | the states that requests went through there                  |
| requests                 | the prompts that the router got last, and their times        |

All times are seconds of the router's CLOCK_MONOTONIC.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from kvxfer.control.view_messages import View
from kvxfer.serve.backend import Backend, BackendState
from kvxfer.serve.lives import Lives
from kvxfer.serve.views import HeldView, ViewTable

Parts = dict[str, bytes]
"""JSON of each."""
CACHE_FIELDS = (
    "num_ranks", "device", "base_address", "reserved_bytes", "committed_bytes", "registered_bytes",
    "budget_bytes", "tombstone_bytes", "pinned_bytes", "is_sleeping", "generation", "epoch",
    "committed", "registered", "groups", "num_requests",
)  # fmt: skip
STEADY_S = 5
"""Times are told to so many decimals: what did not change is the same text again."""

_encoder = msgspec.json.Encoder()


class Watched(Protocol):
    """A router, as far as the page looks at it."""

    views: ViewTable
    lives: Lives

    @property
    def backends(self) -> Iterable[Backend]: ...

    def ask_views(self) -> None: ...


def picture(router: Watched) -> Parts:
    """As it is known now."""
    found: dict[str, Any] = {}
    for backend in router.backends:
        held = router.views.get(backend.key)
        address = backend.key.removeprefix("out:")
        is_there = backend.facts is not None
        found[f"{address}/who"] = {
            "name": backend.name,
            "role": backend.role,
            "is_there": is_there,
            "is_draining": backend.state is BackendState.DRAINING,
        }
        if held is not None and held.view is not None and is_there:
            for name, part in _worker(held, held.view).items():
                found[f"{address}/{name}"] = part
    found["requests"] = [_rounded(msgspec.to_builtins(one)) for one in router.lives.look()]
    return {name: _encoder.encode(part) for name, part in found.items()}


def _worker(held: HeldView, view: View) -> dict[str, Any]:
    return {
        "cache": {name: getattr(view, name) for name in CACHE_FIELDS},
        "lanes": view.lanes,
        "transfers": {
            "num": view.num_transfers,
            "bytes": view.transferred_bytes,
            "newest": [
                {
                    "number": one.number,
                    "peer": one.peer,
                    "lane": one.lane,
                    "start_s": _place(held, one.start_ns),
                    "end_s": _place(held, one.end_ns) if one.end_ns else None,
                    "bytes": one.num_bytes,
                    "error": one.error,
                }
                for one in view.transfers
            ],
        },
        "requests": [
            {
                "id": one.request_id,
                "peer": one.peer,
                "states": [(name, _place(held, at_ns)) for name, at_ns in one.states],
            }
            for one in view.requests
        ],
    }


def _place(held: HeldView, worker_ns: int) -> float:
    return round(held.place_s(worker_ns), STEADY_S)


def _rounded(life: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, STEADY_S) if isinstance(v, float) else v for k, v in life.items()}


class Changes:
    """What one watcher has not been told yet."""

    def __init__(self) -> None:
        self._told: Parts = {}

    def since(self, parts: Parts, now_s: float) -> bytes:
        """An event's data, in one line: {now_s, parts: those that changed, gone: names}."""
        changed = {
            name: msgspec.Raw(data) for name, data in parts.items() if self._told.get(name) != data
        }
        gone = sorted(self._told.keys() - parts.keys())
        self._told = parts
        return _encoder.encode({"now_s": round(now_s, STEADY_S), "parts": changed, "gone": gone})
