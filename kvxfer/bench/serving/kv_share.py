"""What the hand-over of KV takes of the time to the first token, as far as the service tells.

Two ways, which answer two questions:
- `/metrics` of any kvxfer service: the seconds that transfers took, by the seconds that requests
  waited for their first token. Transfers overlap computing and one another, and count in full: it
  is how busy the lanes were, and what of it nobody waited for is in it.
- the workers' traces, of a service that the bench started: for each request the time from the end
  of its prompt's computing to the proof that all its KV is at decode, by its time to the first
  token. That is what of a hand-over computing did not cover. kvxfer tells a first token as soon as
  it is known: what is left then holds up the second token, not the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvxfer.bench.serving.metrics import Answer
from kvxfer.telemetry.reading import totals

TRANSFER_S, FIRST_TOKEN_S = "kvxfer_transfer_seconds", "kvxfer_time_to_first_token_seconds"
TRANSFER_BYTES = "kvxfer_transfer_bytes_total"


@dataclass(frozen=True, slots=True)
class KvCounts:
    """What a service had counted."""

    transfer_s: float
    transfers: float
    num_bytes: float
    first_token_s: float
    """Of all requests together."""
    requests: float
    """That have a first token."""

    @classmethod
    def read(cls, text: str) -> KvCounts | None:
        """None where what answers is no router of kvxfer."""
        try:
            found = totals(text)
        except ValueError:
            return None
        if f"{FIRST_TOKEN_S}_sum" not in found:
            return None
        return cls(
            found.get(f"{TRANSFER_S}_sum", 0.0),
            found.get(f"{TRANSFER_S}_count", 0.0),
            found.get(TRANSFER_BYTES, 0.0),
            found[f"{FIRST_TOKEN_S}_sum"],
            found[f"{FIRST_TOKEN_S}_count"],
        )

    def since(self, before: KvCounts) -> KvCounts:
        return KvCounts(
            self.transfer_s - before.transfer_s,
            self.transfers - before.transfers,
            self.num_bytes - before.num_bytes,
            self.first_token_s - before.first_token_s,
            self.requests - before.requests,
        )

    def summary(self) -> dict[tuple[str, str], float]:
        """Of a difference; empty where nothing was moved: a single process hands nothing over."""
        if self.transfers <= 0 or self.first_token_s <= 0 or self.requests <= 0:
            return {}
        return {
            ("KV transfers", "share of TTFT"): self.transfer_s / self.first_token_s,
            ("KV transfers", "time of a request"): 1e3 * self.transfer_s / self.requests,
            ("KV transfers", "size of a request"): self.num_bytes / self.requests / 1e6,
        }


class _Event(msgspec.Struct):
    at_ns: int
    event: str
    request: str = ""


@dataclass(frozen=True, slots=True)
class HandOver:
    """One request's, by the workers' traces."""

    ms: float
    """From the end of its prompt's computing to the proof that its KV is at decode."""
    share: float
    """Of its time to the first token."""


def hand_overs(traces: Sequence[Path], answers: Sequence[Answer]) -> list[HandOver]:
    """Of the answers that came whole and that the traces tell of. Lines that several processes
    wrote into one another are passed over."""
    computed, filled = _ends(traces)
    found = []
    for answer in answers:
        name = f"{answer.request_id}-0"  # the router's for the first answer of a request
        if answer.failure or name not in computed or name not in filled:
            continue
        ms = max(0, filled[name] - computed[name]) / 1e6
        found.append(HandOver(ms, ms / answer.ttft_ms))
    return found


def _ends(traces: Sequence[Path]) -> tuple[dict[str, int], dict[str, int]]:
    """Of each request, in ns: when its prompt was computed, and when its KV was at decode. The
    first of those that came again, after it had lost its blocks."""
    found: dict[str, dict[str, int]] = {"computed": {}, "filled": {}}
    for path in traces:
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                event = msgspec.json.decode(line, type=_Event)
            except msgspec.MsgspecError:
                continue
            if event.event in found:
                found[event.event].setdefault(event.request, event.at_ns)
    return found["computed"], found["filled"]
