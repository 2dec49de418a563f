"""Options of a worker, and their resolution: every 'auto' is decided once and logged once."""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from kvxfer.errors import UsageError
from kvxfer.telemetry.logs import LogFormat

LAYOUT_VARIABLE = "KVXFER_KV_CACHE_LAYOUT"
DEFAULT_CONNECTORS = "peer,nixl"
KV_STREAM_BYTES = 32 << 20
CPU_KV_CACHE_BYTES = 4 << 30
"""The most a host cache takes unless told: vLLM's default for its CPU backend."""

LONGEST_WORKER_ID = 200
"""With the incarnation it is a ZeroMQ identity (at most 255 bytes) and an agent's name (256)."""

Commit = Literal["all", "elastic"]
Digest = Literal["off", "sampled", "always"]
PeerLoss = Literal["wait", "exit"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a prefill or decode worker may be told. vLLM's names where they mean the same."""

    model: Path
    """Hugging Face directory of a model, decoder-only or of T5's or BART's class: config,
    safetensors, tokenizer."""
    config: Path | None = None
    """TOML file with options under their names, for all commands or in a table of this one. Flags
    rank above KVXFER_* variables, these above the file."""
    listen: str = "tcp://127.0.0.1:0"
    """Control-plane address to bind: tcp on loopback (port 0 takes a free one), with keys on any
    of this host's addresses, or ipc:///PATH, a Unix socket in a directory of mode 0700."""
    advertise: str = ""
    """Address that others dial, where that is not the one to bind (port 0: the port bound). With it
    and keys, listen may be a wildcard, as in tcp://0.0.0.0:5601."""
    key_file: Path | None = None
    """Secret key of this worker, NAME.key of `kvxfer keygen`: every socket is encrypted then, and
    only who has a key of peer_keys comes in. Others dial ADDRESS#NAME."""
    peer_keys: Path | None = None
    """Directory with the NAME.pub of all whom this worker may talk to, routers too; read again when
    one comes or goes."""
    worker_id: str = ""
    """Name of this worker towards others (default: role and a random suffix)."""
    device: str = "auto"
    """cpu, cuda, cuda:N or auto (a GPU where there is one). For several ranks as many, as in
    cuda:0,cuda:1 (default: from the first visible one on); the CPU they share."""
    tensor_parallel_size: int = 1
    """Processes that each hold a part of the model and of the KV heads; its peers' may differ."""
    dtype: str = "auto"
    """float32, bfloat16, float16 or auto (float32 on the CPU, else the checkpoint's)."""
    kv_cache_layout: str = "auto"
    """LBHNC, LBNHC, LHBNC, BLHNC, BLNHC or BHLNC, for all layers or by kind, as in
    full=BLHNC,sliding=LBHNC (default: KVXFER_KV_CACHE_LAYOUT, then what a connector that you named
    prefers, then LBNHC)."""
    kv_cache_layout_override: Annotated[str, Parameter(show=False)] = ""
    """For tests: above all else."""
    block_size: int = 16
    """Tokens per block."""
    max_model_len: int = 0
    """Longest prompt plus output in tokens (default: the model's)."""
    max_num_seqs: int = 16
    """Most sequences in one decode step."""
    max_num_queued_seqs: int = 1024
    """Most prompts that wait: at decode in all, at prefill of each decode worker. One more is
    answered 'try later', with an estimate of when."""
    max_num_batched_tokens: int = 256
    """Tokens of one prefill chunk; KV streams to decode after each."""
    enable_prefix_caching: bool = True
    """Keep the KV of prompts, at decode of answers too, in whole blocks until memory is wanted: of
    a prompt only what follows its longest beginning that is there is computed by prefill, and only
    what decode lacks is handed over. Full and latent attention."""
    enable_extensible_kv_cache: bool | None = None
    """A cache that grows at the same addresses (default: where the device's driver can)."""
    gpu_memory_utilization: float | None = None
    """Share of the device's memory for this worker (default: 1.0 if extensible, which assumes
    that the device is its alone, else 0.92). Give it where a GPU is shared."""
    kv_cache_memory_bytes: int = 0
    """Bytes of KV cache, exactly, of each rank (default: measured after warm-up)."""
    memory_budget_bytes: int = 0
    """Bytes this worker may use in all, weights included (default: what is free)."""
    kv_stream_bytes: int = KV_STREAM_BYTES
    """Hand the KV of a chunk over in groups of layers of at least this many bytes, while later
    layers are computed."""
    kv_digest: Digest = "off"
    """Compare a digest of each prompt's KV at both ends of its hand-over: off, sampled (one request
    in 16) or always. Decode's word counts."""
    kv_commit: Commit = "all"
    """all: commit the whole budget after warm-up; elastic: commit as blocks run low."""
    kv_initial_blocks: int = 0
    """Elastic: blocks of each group committed at the start (default: a sixteenth of the budget)."""
    kv_low_watermark: float = 0.1
    """Elastic: grow ahead of need when a smaller share of the blocks than this is free."""
    kv_high_watermark: float = 1.0
    """Elastic: give memory back when a larger share than this was free for 10 s (1: never)."""
    lane: str = "auto"
    """push, pull or auto (whichever is quicker when lanes are tried out)."""
    connector: str = "auto"
    """Modules of connectors/ that may move KV, separated by commas (default: peer,nixl)."""
    lane_test: bool = True
    """Try lanes out with real bytes when a peer is met, and use the quickest."""
    min_lane_gbps: float = 0.0
    """Refuse a peer whose best lane is slower than this (default: warn below half of what the path
    is known to give)."""
    is_connector_named: Annotated[bool, Parameter(show=False)] = False
    """Whether the user did: only then does its preference for a layout count."""
    threads: int = 1
    """CPU threads of the model; fixed, so that results do not depend on the machine's load."""
    request_timeout_s: float = 120.0
    """Deadline of a hand-over, of a grant and of a lease."""
    peer_timeout_s: float = 5.0
    """Silence after which a peer counts as lost."""
    transfer_timeout_s: float = 30.0
    """A peer with transfers under way, of which none has ended for so long, counts as lost."""
    shutdown_timeout_s: float = 0.0
    """After SIGTERM or Ctrl-C: take nothing new, and have so long to finish what is here (0: end at
    once). A second signal ends at once."""
    on_peer_loss: PeerLoss = "wait"
    """wait for it to come back, or exit with code 1."""
    metrics_port: int = 0
    """Serve Prometheus metrics at http://METRICS_HOST:PORT/metrics (0: do not; a router's /metrics
    has those of its workers), and /health and /ready for probes."""
    metrics_host: str = "127.0.0.1"
    """Address to bind for them. Whoever reaches it can read them: there is no key."""
    otlp_traces_endpoint: str = ""
    """URL that OpenTelemetry traces of requests are sent to (OTLP over HTTP), as in
    http://127.0.0.1:4318/v1/traces. Needs kvxfer[otel]."""
    log_format: LogFormat = "text"
    """text, or json: an object a line, with time, level, role, worker_id, message and, where there
    is one, request_id."""
    trace: Path | None = None
    """Append trace events (JSON lines, monotonic nanoseconds) to this file."""
    ready_fd: Annotated[int, Parameter(show=False)] = -1
    """A launcher's pipe for progress; the worker ends when its launcher does."""


def resolve(options: WorkerOptions, role: str) -> WorkerOptions:
    """A new object without an 'auto' that needs no device; raises UsageError."""
    sizes = ("block_size", "max_num_seqs", "max_num_batched_tokens", "threads")
    positive = (*sizes, "max_num_queued_seqs", "kv_stream_bytes", "tensor_parallel_size")
    natural = ("max_model_len", "kv_cache_memory_bytes", "memory_budget_bytes", "kv_initial_blocks")
    for name, least in [*((n, 1) for n in positive), *((n, 0) for n in natural)]:
        if getattr(options, name) < least:
            raise UsageError(name, getattr(options, name), f"must be at least {least}")
    for name in ("request_timeout_s", "peer_timeout_s", "transfer_timeout_s"):
        if not 0 < getattr(options, name) < math.inf:
            raise UsageError(name, getattr(options, name), "must be more than 0 and finite")
    if not 0 <= options.shutdown_timeout_s < math.inf:
        wrong = options.shutdown_timeout_s
        raise UsageError("shutdown_timeout_s", wrong, "must be 0 or more and finite")
    for name in ("kv_low_watermark", "kv_high_watermark"):
        if not 0 <= getattr(options, name) <= 1:
            raise UsageError(name, getattr(options, name), "must be in [0, 1]")
    if options.kv_low_watermark >= options.kv_high_watermark:
        high = options.kv_high_watermark
        raise UsageError("kv_low_watermark", options.kv_low_watermark, f"must be below {high}")
    if not 0 <= options.metrics_port <= 65535:
        raise UsageError("metrics_port", options.metrics_port, "must be in [0, 65535]")
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
        connector=DEFAULT_CONNECTORS if options.connector == "auto" else options.connector,
        is_connector_named=options.connector != "auto",
    )


def check_device(name: str) -> str:
    """Raise UsageError unless `name` is one that `resolve_device` may accept. Needs no torch."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?|cuda:\d+(,cuda:\d+)+", name):
        reason = "must be cpu, cuda, cuda:N, several such with commas, or auto"
        raise UsageError("device", name, reason)
    return name
