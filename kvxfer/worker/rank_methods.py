"""The closed table of what can be asked of the ranks of a tensor-parallel worker.

All ranks get the same calls in the same order, line by line; a line is served by one thread of its
own, so that KV is moved and memory committed while the model computes. A new kind of call is a
method of RankHost and a row of METHODS.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.cache.table import BlockTable
from kvxfer.control.facts import RankFacts
from kvxfer.model.packing import SequenceStep
from kvxfer.transfer.connector import Direction, TicketResult
from kvxfer.transfer.lanes import Lane
from kvxfer.transfer.plan_parts import MoveParts
from kvxfer.transfer.regions import Region
from kvxfer.worker.rank_host import RankCache, RankGrowth, RankHost, RankUsage
from kvxfer.worker.rank_transfer import Submitted


class LineName(enum.StrEnum):
    """Each has a thread of its own in every rank: in rank 0 the one that calls."""

    MODEL = "model"
    TRANSFER = "transfer"
    CONTROL = "control"
    """What a control thread asks for, which waits for nobody."""


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the table: what runs, and the types that travel."""

    run: Callable[..., Any]
    """Of a RankHost, first argument."""
    arguments: Any
    """A tuple type."""
    result: Any
    line: LineName
    timeout_s: float
    """From the call to the last rank's reply."""
    is_collective: bool = False
    """The ranks wait for one another in it: when some fail, all are out of step for good."""


_MODEL, _TRANSFER = LineName.MODEL, LineName.TRANSFER
_START_S = 900.0
"""Reading a large model, recording its graphs."""
_MEMORY_S = 600.0
"""The host populates about 1 GiB a second."""
_STEP_S = 300.0
"""Longer than the deadline of a collective, whose error says more."""
_BRIEF_S = 30.0

METHODS: Mapping[str, Method] = {
    "load": Method(
        RankHost.load, tuple[str, str | None, int], None, _MODEL, _START_S, is_collective=True
    ),
    "probe_specs": Method(
        RankHost.probe_specs,
        tuple[int],
        tuple[KVCacheSpec, ...],
        _MODEL,
        _STEP_S,
        is_collective=True,
    ),
    "reserve": Method(
        RankHost.reserve, tuple[list[KVCacheLayout], list[int]], RankCache, _MODEL, _MEMORY_S
    ),
    "warm_up": Method(
        RankHost.warm_up, tuple[int, int, int | None], None, _MODEL, _START_S, is_collective=True
    ),
    "prefill_chunk": Method(
        RankHost.prefill_chunk,
        tuple[SequenceStep],
        int | None,
        _MODEL,
        _STEP_S,
        is_collective=True,
    ),
    "decode_step": Method(
        RankHost.decode_step,
        tuple[list[SequenceStep]],
        list[int],
        _MODEL,
        _STEP_S,
        is_collective=True,
    ),
    "prompt_digests": Method(
        RankHost.prompt_digests, tuple[list[BlockTable], int], list[str], _MODEL, _STEP_S
    ),
    "kv_checksum": Method(
        RankHost.kv_checksum,
        tuple[list[list[int]], int, list[KVCacheSpec], int],
        int,
        _MODEL,
        _STEP_S,
    ),
    "measure": Method(RankHost.measure, tuple[float, int], RankUsage, _MODEL, _BRIEF_S),
    "describe": Method(RankHost.describe, tuple[()], RankCache, _TRANSFER, _BRIEF_S),
    "open_connectors": Method(
        RankHost.open_connectors,
        tuple[list[str], str, Direction, bool, str],
        list[str],
        _TRANSFER,
        _MEMORY_S,
    ),
    "prepare": Method(RankHost.prepare, tuple[list[int]], RankGrowth, _TRANSFER, _MEMORY_S),
    "confirm": Method(RankHost.confirm, tuple[()], None, _TRANSFER, _BRIEF_S),
    "retract": Method(RankHost.retract, tuple[()], None, _TRANSFER, _MEMORY_S),
    "revoke": Method(RankHost.revoke, tuple[list[Region], int], bytes, _TRANSFER, _MEMORY_S),
    "retire": Method(RankHost.retire, tuple[frozenset[int]], None, _TRANSFER, _BRIEF_S),
    "connect": Method(
        RankHost.connect, tuple[str, list[RankFacts]], frozenset[str], _TRANSFER, _MEMORY_S
    ),
    "renew": Method(
        RankHost.renew, tuple[str, list[RankFacts]], frozenset[str], _TRANSFER, _MEMORY_S
    ),
    "disconnect": Method(RankHost.disconnect, tuple[str], None, _TRANSFER, _BRIEF_S),
    "submit": Method(
        RankHost.submit, tuple[str, Lane, list[MoveParts]], list[Submitted], _TRANSFER, _BRIEF_S
    ),
    "poll": Method(RankHost.poll, tuple[()], list[TicketResult], _TRANSFER, _BRIEF_S),
    "write_pattern": Method(
        RankHost.write_pattern, tuple[list[int], int], None, _TRANSFER, _BRIEF_S
    ),
    "erase_pattern": Method(RankHost.erase_pattern, tuple[list[int]], None, _TRANSFER, _BRIEF_S),
    "check_pattern": Method(
        RankHost.check_pattern, tuple[list[int], int], bool, _TRANSFER, _BRIEF_S
    ),
    "close_connectors": Method(RankHost.close_connectors, tuple[()], None, _TRANSFER, _BRIEF_S),
    "invite": Method(RankHost.invite, tuple[int], list[bytes], LineName.CONTROL, _BRIEF_S),
}
