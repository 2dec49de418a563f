"""Where the time to a handed-over prompt's tokens goes: a router's view and two traces, joined.

All times are nanoseconds of CLOCK_MONOTONIC of one host. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Event = dict[str, Any]

STEPS = (
    ("accepted", "prompt: router → decode"),
    ("requested", "grant: decode → prefill"),
    ("computed", "prefill, as its control thread sees it"),
    ("last_read", "KV still under way after prefill"),
    ("taken", "all read: decode → prefill"),
    ("filled", "confirmed: prefill → decode"),
    ("second", "first decode step, and its token → router"),
)
"""What ends a part of the time, and what the part is; pushed KV has no 'taken'."""
FIRST = "first token: prefill → decode → router"
"""While the last KV is under way."""
LATER = ("last_read", "taken")
"""They count from the end of prefill at the earliest."""


def moments_of(
    request: str, sent_ns: int, seen_ns: Sequence[int], trace: Sequence[Event]
) -> dict[str, int]:
    """When each step of `request` ended, in order; 'sent' is the first. Steps that no event tells
    of are left out. 'first', when the router saw the first token, stands at the end."""
    mine = [event for event in trace if event.get("request") == request]
    found = {event["event"]: event["at_ns"] for event in mine}
    for event in mine:
        if event["event"] == "transfer_end":
            found["last_read"] = event["end_ns"]
    found["second"] = seen_ns[1]
    moments = {"sent": sent_ns}
    for name, _ in STEPS:
        if name in found:
            before = max(moments.values()) if name in LATER else 0
            moments[name] = max(found[name], before)
    return {**moments, "first": seen_ns[0]}


def parts_of(moments: Mapping[str, int]) -> dict[str, float]:
    """Milliseconds of each part, by its words; but for FIRST, which is none of the second token's,
    they add up to that one's time."""
    words = dict(STEPS)
    steps = [name for name in moments if name != "first"]
    parts = {words[name]: moments[name] - moments[before] for before, name in pairwise(steps)}
    if "computed" in moments:
        parts[FIRST] = moments["first"] - moments["computed"]
    return {name: nanoseconds / 1e6 for name, nanoseconds in parts.items()}
