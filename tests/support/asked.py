"""A request to a service, what it should come to, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from support.null_runner import Reference
from support.violations import WrongToken


@dataclass
class Asked:
    """A request, what it should come to, and how it ended ('' while it has not)."""

    name: str
    tokens: list[int]
    max_new_tokens: int
    reference: Reference
    reason: str = ""
    error: str = ""
    output: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    router: str = "router"
    asked_s: float = field(default_factory=time.monotonic)
    took_s: float = 0.0

    @property
    def is_served(self) -> bool:
        return self.reason == "length"

    def check(self) -> None:
        """No wrong token, ever; all of them, and the right KV, where it says that it is whole."""
        if self.output != self.reference.tokens[: len(self.output)]:
            raise WrongToken(str(self))
        if self.is_served:
            whole = self.reference.tokens, self.reference.digests
            if (self.output, self.digests) != whole:
                raise WrongToken(f"{self} is not whole")
        elif self.reason in ("error", "lost", "overloaded", "refused"):
            assert self.error, f"no reason is given: {self}"
        else:
            assert self.reason == "cancelled", self


def check_ended(found: Sequence[Asked]) -> dict[str, int]:
    """How they ended, counted."""
    counts: dict[str, int] = {}
    for asked in found:
        counts[asked.reason] = counts.get(asked.reason, 0) + 1
    return counts
