"""What everything costs in the model, and where each number comes from.

A file of costs is a JSON object: `what` says which worker it is of, `costs` has each number of
`Costs` by its name, with its `value` and its `source`. All in seconds, but where the name says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import msgspec

from kvxfer.errors import UsageError

POSITIVE = ("lane_bytes_per_s", "kv_token_bytes", "prefill_token_s", "decode_step_s")
"""The others may be 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of one kind of machine. Defaults are those of what costs nothing worth a name there."""

    client_request_s: float = 0.0
    """Of the client's process, where it shares the workers' cores: to send a request."""
    client_delivery_s: float = 0.0
    """To wake up for tokens that came together ..."""
    client_token_s: float = 0.0
    """... and for each of them."""
    front_request_s: float
    """The router with its HTTP front, one process: a request, without the choice of its pair."""
    front_prompt_token_s: float = 0.0
    """And for each token of its prompt."""
    front_delivery_s: float
    """Tokens that a decode worker tells at once: to wake up for them ..."""
    front_token_s: float
    """... and each of them, to its stream."""
    place_s: float = 0.0
    """To choose a pair for a request ..."""
    place_worker_s: float = 0.0
    """... for each worker, ..."""
    place_flight_s: float = 0.0
    """... for each worker and request under way, ..."""
    place_pair_s: float = 0.0
    """... and for each pair that is as good as the best."""
    status_s: float = 0.0
    """To ask a worker how it is and take in its answer ..."""
    status_peer_s: float = 0.0
    """... and for each peer that it tells of."""
    hop_s: float = 0.0
    """A message's way between two processes, which nobody works at."""
    decode_control_s: float
    """Decode's control thread, for a hand-over: half before prefill's model, half after."""
    prefill_control_s: float
    """Prefill's, alike."""
    message_s: float = 0.0
    """A heartbeat, or what comes with it: to send it, or to take it in."""
    prefill_chunk_s: float
    """A chunk of a prompt: fixed, ..."""
    prefill_token_s: float
    """... for each token, ..."""
    prefill_context_s: float = 0.0
    """... and for each token and token in front of the chunk."""
    lane_s: float
    """A transfer: fixed; the rest by its bytes."""
    lane_bytes_per_s: float
    """Of one transfer, that has the link to itself."""
    first_token_s: float = 0.0
    """From the end of a prompt's computing to its first token at the client, without what the
    router and the client work at it."""
    decode_step_s: float
    """A step of decode's batch: fixed, ..."""
    decode_sequence_s: float
    """... for each sequence, ..."""
    decode_context_s: float = 0.0
    """... and for each token of KV that all of them have."""
    crowding: float = 0.0
    """Where processes share cores: by which share each is slower for each other core in use, since
    they share caches, memory, and perhaps one real core. No seconds."""
    growth_s: float = 0.0
    """A cache grows: until its new blocks are of use, fixed ..."""
    growth_block_s: float = 0.0
    """... and for each block."""
    kv_token_bytes: float
    """Bytes of KV of a token."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each number comes from, in words, by its name."""
    what: str = ""
    """The worker that they are of."""

    def __post_init__(self) -> None:
        for name in NAMES:
            value = getattr(self, name)
            least = "more than 0" if name in POSITIVE else "at least 0"
            if not (math.isfinite(value) and (value > 0 or (value == 0 and name not in POSITIVE))):
                raise UsageError(f"costs: {name}", value, f"must be {least}, and finite")

    def chunk_s(self, num_tokens: int, context: int) -> float:
        """Of a prompt's chunk, behind `context` tokens. A token attends to those in front of it in
        the chunk too: half of them in the mean, which prefill_token_s has."""
        each = self.prefill_token_s + self.prefill_context_s * context
        return self.prefill_chunk_s + num_tokens * each

    def step_s(self, num_sequences: int, context: int) -> float:
        """Of a decode step whose sequences have `context` tokens of KV together."""
        each = self.decode_sequence_s * num_sequences
        return self.decode_step_s + each + self.decode_context_s * context

    def transfer_s(self, num_bytes: float) -> float:
        return self.lane_s + num_bytes / self.lane_bytes_per_s


NAMES = tuple(one.name for one in fields(Costs) if one.name not in ("sources", "what"))
REQUIRED = tuple(
    one.name for one in fields(Costs) if one.name in NAMES and not isinstance(one.default, float)
)


class _Cost(msgspec.Struct, forbid_unknown_fields=True):
    value: float
    source: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    what: str
    costs: dict[str, _Cost]


def read_costs(path: Path) -> Costs:
    """Raises UsageError where it is no file of costs, lacks one, or has one that is not known."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise UsageError("costs", str(path), error.strerror or str(error)) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UsageError("costs", str(path), f"is no file of costs: {error}") from None
    for name in found.costs:
        if name not in NAMES:
            raise UsageError("costs", str(path), f"has {name!r}, which is no cost")
    for name in REQUIRED:
        if name not in found.costs:
            raise UsageError("costs", str(path), f"lacks {name}")
    values = {name: one.value for name, one in found.costs.items()}
    sources = {name: one.source for name, one in found.costs.items()}
    return Costs(**values, sources=sources, what=found.what)


def write_costs(path: Path, costs: Costs) -> None:
    """All of them; one without a source is 0 by default."""
    rows = {name: _Cost(getattr(costs, name), costs.sources.get(name, "default")) for name in NAMES}
    data = msgspec.json.format(msgspec.json.encode(_File(costs.what, rows)), indent=1)
    try:
        path.write_bytes(data + b"\n")
    except OSError as error:
        raise UsageError("out", str(path), error.strerror or str(error)) from None


def assume(costs: Costs, changes: Sequence[str]) -> Costs:
    """With `changes`, each NAME=VALUE. Raises UsageError."""
    values: dict[str, float] = {}
    for text in changes:
        name, _, value = text.partition("=")
        if name not in NAMES:
            reason = f"must be COST=VALUE, with a cost of {', '.join(NAMES)}"
            raise UsageError("assume", text, reason)
        try:
            values[name] = float(value)
        except ValueError:
            raise UsageError("assume", text, "has no number after =") from None
    sources = {**costs.sources, **{name: f"assumed: {values[name]:g}" for name in values}}
    return replace(costs, **values, sources=sources)  # type: ignore[arg-type]
