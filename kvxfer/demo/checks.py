"""What the demo proves from the traces: decode grew while another request was on its way, and
bytes landed in the new range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.cache.footprint import has_encoder
from kvxfer.cache.spec import KVCacheSpec
from kvxfer.config import Commit

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GrowthInFlight:
    """transfer start < generation change < transfer end, in nanoseconds of CLOCK_MONOTONIC."""

    transfer_request: str
    start_ns: int
    generation_ns: int
    end_ns: int
    generation: int
    old_blocks: int
    """Usable before and after, of all groups together."""
    new_blocks: int
    landed_request: str
    """A request whose KV was proved complete, after the growth, in blocks that it added."""


def why_no_growth(specs: Sequence[KVCacheSpec], commit: Commit) -> str:
    """Why decode cannot be made to grow while a prompt's KV streams, or ''."""
    if commit == "all":
        return "everything was committed from the start"
    if has_encoder(specs):
        return "the encoder sees a prompt at once, so that its KV arrives in one piece"
    if all(spec.window for spec in specs):
        return "all layers have a window: a sequence's few blocks are used round and round"
    return ""


def growths(decode_trace: list[Event]) -> list[Event]:
    """Every growth after the first extension."""
    events = [event for event in decode_trace if event["event"] == "generation"]
    return [event for event in events if event["generation"] > 1]


def growth_in_flight(
    transfer_events: list[Event], decode_trace: list[Event]
) -> GrowthInFlight | None:
    """The first growth that a transfer of another request spans, with bytes in the new range."""
    ends = [event for event in transfer_events if event["event"] == "transfer_end"]
    fills = [event for event in decode_trace if event["event"] == "filled"]
    for growth in growths(decode_trace):
        landed = [
            fill["request"]
            for fill in fills
            if fill["at_ns"] > growth["at_ns"] and _is_in(fill["blocks"], growth)
        ]
        for end in ends:
            spans = end["start_ns"] < growth["at_ns"] < end["end_ns"]
            others = [request for request in landed if request != end["request"]]
            if spans and others:
                return GrowthInFlight(
                    end["request"],
                    end["start_ns"],
                    growth["at_ns"],
                    end["end_ns"],
                    growth["generation"],
                    sum(growth["old_blocks"]),
                    sum(growth["new_blocks"]),
                    others[0],
                )
    return None


def _is_in(blocks: list[list[int]], growth: Event) -> bool:
    """Whether a request holds a block, of any group, that the growth added."""
    bounds = zip(blocks, growth["old_blocks"], growth["new_blocks"], strict=True)
    return any(old <= block < new for ids, old, new in bounds for block in ids)
