"""Messages by which a pair of workers tries its lanes out (`decode.lane_trials` leads).

| from → to        | message    | when |
| ---              | ---        | --- |
| decode → prefill | LaneTrial  | each has loaded the other's regions: prepare for trials |
| prefill → decode | LaneReady  | the pattern may be pulled |
| decode → prefill | LanePush   | push the pattern by this lane |
| prefill → decode | LanePushed | it is visible, or failed |
| decode → prefill | LaneChosen | the lane of this pair from now on |

LaneTrial and LanePush are said again until they are answered, which they are each time. Of a trial
that prefill says is over, or not now, nothing is begun or pushed any more.
"""

from __future__ import annotations

from kvxfer.control.cache_messages import WireStruct


class LaneTrial(WireStruct, frozen=True):
    """Trials of `num_tokens` tokens' KV in the first group, into these destination blocks."""

    trial_id: str
    num_tokens: int
    blocks: list[int]


class LaneReady(WireStruct, frozen=True):
    """`blocks` hold the pattern of `trial_id`; none if there is no room for a trial now."""

    trial_id: str
    blocks: list[int]


class LanePush(WireStruct, frozen=True):
    trial_id: str
    lane: str
    num_tokens: int
    """The first of the trial's: a slow lane is known by a few."""


class LanePushed(WireStruct, frozen=True):
    trial_id: str
    lane: str
    num_tokens: int
    """As in the LanePush that this answers."""
    elapsed_ns: int
    """Of the quickest of several transfers."""
    error: str
    """Why the lane cannot be used, or ''."""


class LaneChosen(WireStruct, frozen=True):
    trial_id: str
    """'' where none was begun."""
    lane: str
    gbps: float
    """As measured; 0 where it was not."""
    proven: list[str]
    """The lanes that delivered every byte, `lane` among them."""
