"""Everything the demo decides before it starts a process: sizes, prompts, worker options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvxfer.cache.layout import KVCacheLayout
from kvxfer.config import Commit, check_device
from kvxfer.demo.prompts import TINY_MODEL, Prompt, read_prompts
from kvxfer.errors import UsageError
from kvxfer.launch.local import divide_budget
from kvxfer.memory.limits import HostMemory
from kvxfer.model.loader import ModelInfo, inspect_model
from kvxfer.model.tokenizer import Tokenizer
from kvxfer.transfer.lanes import LANES

BLOCK_SIZE = 16
LARGEST_CHUNK_TOKENS = 128
WORKER_BUDGET_BYTES = 1 << 30
"""The most that a worker of the demo may use, weights and libraries included: enough to show
growth, and small beside what else runs on the machine."""
GPU_WORKER_BUDGET_BYTES = 4 << 30
"""On a GPU, which the demo's workers share: what each measures of it includes what the others take
while they start, a context of hundreds of MiB each."""
NVIDIA_CONTROL = Path("/dev/nvidiactl")
"""There where the kernel has NVIDIA's driver; asking torch would cost seconds."""
NUM_WORKERS = 3
"""Prefill, decode, and the single process that they are compared with."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What `kvxfer demo` may be told."""

    model: Path = TINY_MODEL
    """Hugging Face directory of a model: decoder-only, or of T5's or BART's class (default: the
    bundled one)."""
    prompt: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """A prompt; may be given several times (default: three passages of Shakespeare)."""
    prompt_file: Path | None = None
    """A file with one prompt a line."""
    device: str = "auto"
    """cpu, cuda, cuda:N or auto."""
    layout_prefill: str = "LBHNC"
    """Cache layout of prefill: LBHNC, LBNHC, LHBNC, BLHNC, BLNHC or BHLNC."""
    layout_decode: str = "BLHNC"
    """Cache layout of decode; it may differ."""
    lane: str = "auto"
    """push (prefill writes), pull (decode reads) or auto."""
    kv_commit: Commit = "elastic"
    """elastic: decode starts with few blocks and grows; all: everything after warm-up."""
    max_new_tokens: int = 48
    """Tokens generated for each prompt."""
    keep_logs: Annotated[Path | None, Parameter(negative=())] = None
    """Write the workers' logs and traces to this directory instead of deleting them."""
    json: bool = False
    """Print one JSON object instead of text and a table."""


@dataclass(frozen=True)
class DemoPlan:
    """Checked options and what follows from them."""

    options: DemoOptions
    info: ModelInfo
    tokenizer: Tokenizer
    prompts: list[Prompt]
    budget_bytes: int
    companion_tokens: int
    grower_tokens: int

    @property
    def chunk_tokens(self) -> int:
        """Small enough that the companion's KV leaves in about eight pieces."""
        eighth = self.companion_tokens // 8 // BLOCK_SIZE * BLOCK_SIZE
        return max(BLOCK_SIZE, min(LARGEST_CHUNK_TOKENS, eighth))

    def blocks(self, num_prompt_tokens: int) -> int:
        return -(-(num_prompt_tokens + self.options.max_new_tokens) // BLOCK_SIZE)

    @property
    def decode_initial_blocks(self) -> int:
        """Room for the prompts and for the companion, and not for a grower beside it."""
        prompts = sum(self.blocks(len(prompt.tokens)) for prompt in self.prompts)
        pair = self.blocks(self.companion_tokens) + self.blocks(self.grower_tokens) // 4
        return 1 + max(prompts, pair)

    def worker_arguments(self, role: str, trace: Path) -> list[str]:
        options = self.options
        layout = options.layout_decode if role == "decode" else options.layout_prefill
        initial = self.decode_initial_blocks if role == "decode" else 0
        return [
            *("--model", str(self.info.model_dir.resolve())),
            *("--worker-id", f"{role}-0"),
            *("--device", options.device),
            *("--kv-cache-layout", layout),
            *("--block-size", str(BLOCK_SIZE)),
            *("--max-num-batched-tokens", str(self.chunk_tokens)),
            *("--memory-budget-bytes", str(self.budget_bytes)),
            *("--kv-commit", options.kv_commit),
            *("--kv-initial-blocks", str(initial)),
            *("--kv-low-watermark", "0"),  # it grows when the demo's own prompts want it to
            "--no-enable-prefix-caching",  # its figures are of prefill, and no bit may differ
            *("--lane", options.lane),
            *("--on-peer-loss", "exit"),
            *("--trace", str(trace)),
        ]


def plan_demo(options: DemoOptions) -> DemoPlan:
    """Check everything that can be checked without starting anything. Raises UsageError."""
    KVCacheLayout.parse("layout_prefill", options.layout_prefill)
    KVCacheLayout.parse("layout_decode", options.layout_decode)
    check_device(options.device)
    if options.lane not in LANES:
        raise UsageError("lane", options.lane, f"must be one of {', '.join(LANES)}")
    if options.max_new_tokens < 1:
        raise UsageError("max_new_tokens", options.max_new_tokens, "must be at least 1")
    info = inspect_model(options.model)
    tokenizer = Tokenizer.load(options.model)
    prompts = read_prompts(list(options.prompt), options.prompt_file, tokenizer)
    for prompt in prompts:
        _check_length(prompt, info, options.max_new_tokens)
    longest = min(info.max_model_len - options.max_new_tokens, 1600)
    if longest < 8 * BLOCK_SIZE:
        raise UsageError(
            "max_new_tokens",
            options.max_new_tokens,
            f"leaves {longest} of the model's {info.max_model_len} tokens for prompts, too few",
        )
    budget = worker_budget_bytes(options.device)
    return DemoPlan(options, info, tokenizer, prompts, budget, longest * 3 // 4, longest)


def worker_budget_bytes(device: str) -> int:
    """What each worker may use in all; `device` as the option has it."""
    if device.startswith("cuda") or (device == "auto" and NVIDIA_CONTROL.exists()):
        return GPU_WORKER_BUDGET_BYTES
    return divide_budget(HostMemory().measure().free_bytes, NUM_WORKERS, WORKER_BUDGET_BYTES)


def _check_length(prompt: Prompt, info: ModelInfo, max_new_tokens: int) -> None:
    total = len(prompt.tokens) + max_new_tokens
    if not prompt.tokens:
        raise UsageError("prompt", prompt.text, "has no tokens")
    if total > info.max_model_len:
        shown = prompt.text if len(prompt.text) <= 40 else prompt.text[:37] + "..."
        raise UsageError(
            "prompt",
            shown,
            f"{len(prompt.tokens)} tokens + {max_new_tokens} new ones are more than the model's "
            f"{info.max_model_len}",
        )
