"""What the benches of memory under a service's load may be told, all of them.

Annotations are objects here, not text: the command line evaluates text where a subclass stands.
"""

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from kvxfer.errors import UsageError


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The load, and where it runs."""

    device: str = "auto"
    """cpu, cuda, cuda:N or auto."""
    model: Path | None = None
    """Directory of the model that serves (default: random weights in the shape of Llama 3.2 1B; on
    the CPU the bundled model)."""
    draft: Path | None = None
    """Directory of the model that drafts (default: that of --model, or a small random one)."""
    sequences: int = 64
    """Sequences served at once: the largest batch of a decode step."""
    draft_tokens: int = 4
    """Tokens drafted, and verified in one pass, for each sequence and step."""
    prompt_tokens: int = 128
    """Tokens of each prompt; of the longest where they vary."""
    steps: int = 3
    """Speculative steps of one run of the load."""
    max_num_batched_tokens: int = 2048
    """Tokens of one pass of prefill."""
    block_size: int = 16
    """Tokens per block."""
    kv_cache_layout: str = "auto"
    """Layout of the served model's cache."""
    memory_budget_bytes: int = 0
    """Bytes that may be used in all (default: the device's)."""
    connector: str = ""
    """Module of connectors/ whose memory is to be counted too (default: none is made)."""
    threads: int = 1
    """CPU threads of the models."""
    json: Path | None = None
    """Keep the figures in this file, from the first one on."""

    def check(self) -> str:
        """The device; raises UsageError for what can be refused before anything is loaded."""
        from kvxfer.worker.device import resolve_device

        positive = ("sequences", "draft_tokens", "prompt_tokens", "steps", "block_size", "threads")
        for name in positive:
            if getattr(self, name) < 1:
                raise UsageError(name, getattr(self, name), "must be at least 1")
        if self.max_num_batched_tokens < 1 or self.max_num_batched_tokens % self.block_size:
            tokens = self.max_num_batched_tokens
            raise UsageError("max_num_batched_tokens", tokens, "must be whole blocks")
        if self.memory_budget_bytes < 0:
            raise UsageError("memory_budget_bytes", self.memory_budget_bytes, "is negative")
        return resolve_device(self.device)
