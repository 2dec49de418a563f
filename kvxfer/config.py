"""Options of a worker, and their resolution: every 'auto' is decided once and logged once."""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from kvxfer.errors import UsageError

logger = logging.getLogger(__name__)

LAYOUT_VARIABLE = "KVXFER_KV_CACHE_LAYOUT"
DEFAULT_LAYOUT = "LBHNC"
CPU_KV_CACHE_BYTES = 4 << 30
"""The most a host cache takes unless told: vLLM's default for its CPU backend."""

LONGEST_WORKER_ID = 200
"""With the incarnation it is a ZeroMQ identity (at most 255 bytes) and an agent's name (256)."""

Commit = Literal["all", "elastic"]
PeerLoss = Literal["wait", "exit"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a prefill or decode worker may be told. vLLM's names where they mean the same."""

    model: Path
    """Hugging Face directory of a decoder-only model: config, safetensors, tokenizer."""
    listen: str = "tcp://127.0.0.1:0"
    """Control-plane address to bind; port 0 takes a free one."""
    worker_id: str = ""
    """Name of this worker towards others (default: role and a random suffix)."""
    device: str = "auto"
    """cpu, cuda, cuda:N or auto (a GPU where there is one)."""
    dtype: str = "auto"
    """float32, bfloat16, float16 or auto (float32 on the CPU, else the checkpoint's)."""
    kv_cache_layout: str = "auto"
    """LBHNC, LBNHC, LHBNC, BLHNC, BLNHC or BHLNC (default: KVXFER_KV_CACHE_LAYOUT, then LBHNC)."""
    block_size: int = 16
    """Tokens per block."""
    max_model_len: int = 0
    """Longest prompt plus output in tokens (default: the model's)."""
    max_num_seqs: int = 16
    """Most sequences in one decode step."""
    max_num_batched_tokens: int = 256
    """Tokens of one prefill chunk; KV streams to decode after each."""
    enable_extensible_kv_cache: bool | None = None
    """A cache that grows at the same addresses (default: where the device's driver can)."""
    gpu_memory_utilization: float | None = None
    """Share of the device's memory for this worker (default: 1.0 if extensible, which assumes
    that the device is its alone, else 0.92). Give it where a GPU is shared."""
    kv_cache_memory_bytes: int = 0
    """Bytes of KV cache, exactly (default: measured after warm-up)."""
    memory_budget_bytes: int = 0
    """Bytes this worker may use in all, weights included (default: what is free)."""
    kv_commit: Commit = "all"
    """all: commit the whole budget after warm-up; elastic: commit as blocks run low."""
    kv_initial_blocks: int = 0
    """Elastic: blocks committed at the start (default: a sixteenth of the budget)."""
    lane: str = "auto"
    """push, pull or auto (pull on GPUs, push on the host)."""
    connector: str = "nixl"
    """Module of connectors/ that moves KV."""
    threads: int = 1
    """CPU threads of the model; fixed, so that results do not depend on the machine's load."""
    request_timeout_s: float = 120.0
    """Deadline of a hand-over, of a grant and of a lease."""
    peer_timeout_s: float = 5.0
    """Silence after which a peer counts as lost."""
    on_peer_loss: PeerLoss = "wait"
    """wait for it to come back, or exit with code 1."""
    trace: Path | None = None
    """Append trace events (JSON lines, monotonic nanoseconds) to this file."""
    ready_fd: Annotated[int, Parameter(show=False)] = -1
    """A launcher's pipe for progress; the worker ends when its launcher does."""


def resolve(options: WorkerOptions, role: str) -> WorkerOptions:
    """A new object without an 'auto' that needs no device; raises UsageError."""
    positive = ("block_size", "max_num_seqs", "max_num_batched_tokens", "threads")
    natural = ("max_model_len", "kv_cache_memory_bytes", "memory_budget_bytes", "kv_initial_blocks")
    for name, least in [*((n, 1) for n in positive), *((n, 0) for n in natural)]:
        if getattr(options, name) < least:
            raise UsageError(name, getattr(options, name), f"must be at least {least}")
    for name in ("request_timeout_s", "peer_timeout_s"):
        if not 0 < getattr(options, name) < math.inf:
            raise UsageError(name, getattr(options, name), "must be more than 0 and finite")
    if len(options.worker_id.encode()) > LONGEST_WORKER_ID:
        reason = f"longer than {LONGEST_WORKER_ID} bytes"
        raise UsageError("worker_id", options.worker_id, reason)
    if options.max_num_batched_tokens % options.block_size:
        raise UsageError(
            "max_num_batched_tokens", options.max_num_batched_tokens, "must be whole blocks"
        )
    return replace(
        options,
        worker_id=options.worker_id or f"{role}-{secrets.token_hex(3)}",
        kv_cache_layout=_resolve_layout(options.kv_cache_layout),
    )


def _resolve_layout(asked: str) -> str:
    """The single writer of the layout: the user's flag, then the variable, then the default."""
    if asked != "auto":
        reason, layout = "asked for by --kv-cache-layout", asked
    elif LAYOUT_VARIABLE in os.environ:
        reason, layout = f"asked for by {LAYOUT_VARIABLE}", os.environ[LAYOUT_VARIABLE]
    else:
        reason, layout = "the default", DEFAULT_LAYOUT
    logger.info("KV cache layout %s: %s", layout, reason)
    return layout


def check_device(name: str) -> str:
    """Raise UsageError unless `name` is one that `resolve_device` may accept. Needs no torch."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UsageError("device", name, "must be cpu, cuda, cuda:N or auto")
    return name
