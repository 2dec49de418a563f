"""What the demo found, request by request, and its verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kvxfer.demo.checks import GrowthInFlight
from kvxfer.demo.prompts import Prompt
from kvxfer.serve.completion import Completion

Numbers = dict[str, int | float | str]


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One prompt: handed over, decoded, and compared with the single process."""

    name: str
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    bytes: int
    seconds: float
    """Sum over its transfers of submitted → complete."""
    gb_per_s: float
    runs: int
    """Descriptors, after coalescing."""
    transfers: int
    blocks: int
    tokens_equal: bool
    kv_equal: bool
    text: str


def compare(
    prompt: Prompt, text: str, handed_over: Completion, reference: Completion
) -> RequestResult:
    """Equal means: bit-identical KV of the prompt, block by block, and the same tokens."""
    assert handed_over.finished is not None
    assert reference.finished is not None
    stats = handed_over.transfer
    digests = handed_over.finished.kv_digests
    seconds = stats.busy_ns / 1e9
    return RequestResult(
        name=prompt.name,
        prompt_tokens=len(prompt.tokens),
        output_tokens=len(handed_over.output),
        ttft_s=handed_over.ttft_s,
        bytes=stats.num_bytes,
        seconds=seconds,
        gb_per_s=stats.num_bytes / 1e9 / seconds if seconds else 0.0,
        runs=stats.num_runs,
        transfers=stats.num_tickets,
        blocks=handed_over.finished.num_blocks,
        tokens_equal=handed_over.output == reference.output,
        kv_equal=bool(digests) and digests == reference.finished.kv_digests,
        text=text,
    )


@dataclass(frozen=True, slots=True)
class DemoResult:
    """`before` and `after`: the workers' cache accounts around the growth."""

    lane: str
    requests: list[RequestResult]
    before: dict[str, Numbers]
    after: dict[str, Numbers]
    growth: GrowthInFlight | None
    why_no_growth: str = ""
    """Why decode could not be made to grow here; '' where it had to."""

    @property
    def tokens_equal(self) -> bool:
        return all(request.tokens_equal for request in self.requests)

    @property
    def kv_equal(self) -> bool:
        return all(request.kv_equal for request in self.requests)

    @property
    def grew(self) -> bool:
        """Same base, more committed and registered bytes, a newer generation."""
        before, after = self.before["decode"], self.after["decode"]
        return (
            before["base_address"] == after["base_address"]
            and int(after["committed_bytes"]) > int(before["committed_bytes"])
            and int(after["registered_bytes"]) == int(after["committed_bytes"])
            and int(after["generation"]) > int(before["generation"])
        )

    @property
    def grew_in_flight(self) -> bool:
        return self.growth is not None

    @property
    def ok(self) -> bool:
        grown = self.grew and self.grew_in_flight
        return self.tokens_equal and self.kv_equal and (grown or bool(self.why_no_growth))

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "tokens_equal": self.tokens_equal,
            "kv_equal": self.kv_equal,
            "grew": self.grew,
            "grew_in_flight": self.grew_in_flight,
            "why_no_growth": self.why_no_growth,
            "lane": self.lane,
            "growth": asdict(self.growth) if self.growth else None,
            "requests": [asdict(request) for request in self.requests],
            "before": self.before,
            "after": self.after,
        }
