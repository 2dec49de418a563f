"""`kvxfer bench tokens`: what a hand-over adds to the time of a prompt's first two tokens.

A prefill worker, a decode worker and a single process that does both, all with the same model and
the same chunks, answer the same prompts in turn; times are those that the router sees. The single
process sends all of an answer at its end: its first token is timed by an answer of one, its second
by an answer of two.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from kvxfer.config import KV_STREAM_BYTES
from kvxfer.errors import UsageError

if TYPE_CHECKING:
    from kvxfer.bench.token_cluster import TokenCluster
    from kvxfer.bench.token_model import TokenModel

GPU_PROMPT_TOKENS, HOST_PROMPT_TOKENS = 4096, 1024


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TokensOptions:
    """What `kvxfer bench tokens` may be told."""

    devices: str = "auto"
    """Prefill's and decode's, such as cuda:0,cuda:1 or cpu,cpu (auto: two GPUs, one twice, or the
    host, whichever is there). The single process runs on prefill's."""
    model: Path | None = None
    """Directory of a decoder-only model (default: random weights with the KV of Llama 3 8B; on the
    CPU the bundled model)."""
    intermediate_size: int = 8192
    """Of the random model's MLPs."""
    keep_model: Annotated[Path | None, Parameter(negative=())] = None
    """Write the random model to this directory, or use the one that an earlier run left there."""
    prompt_tokens: int = 0
    """Tokens of each prompt (default: 4,096; on the CPU 1,024)."""
    requests: int = 15
    """Prompts that are measured."""
    warm_up: int = 4
    """Prompts before, which are not."""
    verified: int = 2
    """Prompts more of which all KV is compared, too, and `verified_tokens` tokens."""
    verified_tokens: int = 32
    """Tokens of an answer that is compared."""
    max_num_batched_tokens: int = 2048
    """Tokens of one prefill chunk."""
    kv_stream_bytes: int = KV_STREAM_BYTES
    """As the workers' option of that name."""
    kv_cache_layout: str = "auto"
    """Of all caches."""
    connector: str = "peer,nixl"
    """Modules of connectors/ that may move KV; the quickest lane in a trial is used."""
    lane: str = "auto"
    """push, pull or auto."""
    kv_mib: int = 0
    """MiB of each cache (default: 4,096; on the CPU 128)."""
    threads: int = 1
    """CPU threads of each model."""
    json: Path | None = None
    """Keep the figures in this file."""
    keep_logs: Annotated[Path | None, Parameter(negative=())] = None
    """Write the workers' logs and traces to this directory instead of deleting them."""


def run_tokens(options: TokensOptions) -> int:
    """Measure, print, write; 1 when a bar was missed or an answer is wrong. Raises KvxferError."""
    from kvxfer.bench.record import Record, command_line
    from kvxfer.bench.report import describe_machine
    from kvxfer.bench.token_cluster import start_cluster
    from kvxfer.bench.token_figures import figures_of
    from kvxfer.bench.token_model import token_model
    from kvxfer.bench.token_rounds import measure
    from kvxfer.bench.transfer_devices import resolve_devices

    _check(options)
    devices = resolve_devices(options.devices)
    record = Record(options.json, command_line("tokens", options))
    with ExitStack() as undo:
        told = options.model, devices[0], options.intermediate_size, options.keep_model
        model = undo.enter_context(token_model(*told))
        cluster = start_cluster(options, model.info, devices, undo)
        record.machine = f"{describe_machine(devices[0])}; {_words(options, model, cluster)}"
        print(record.machine, flush=True)
        length = prompt_tokens(options, devices[0])
        found = measure(cluster, model.info, options, length)
    record.add(*figures_of(found, length))
    return record.exit_code


def prompt_tokens(options: TokensOptions, device: str) -> int:
    """Resolved."""
    usual = HOST_PROMPT_TOKENS if device == "cpu" else GPU_PROMPT_TOKENS
    return options.prompt_tokens or usual


def _check(options: TokensOptions) -> None:
    for name in ("requests", "verified", "verified_tokens", "threads"):
        if getattr(options, name) < 1:
            raise UsageError(name, getattr(options, name), "must be at least 1")
    for name in ("warm_up", "kv_mib", "prompt_tokens"):
        if getattr(options, name) < 0:
            raise UsageError(name, getattr(options, name), "is negative")


def _words(options: TokensOptions, model: TokenModel, cluster: TokenCluster) -> str:
    """What was measured, and where."""
    return (
        f"prefill and single process on {cluster.device_of(cluster.prefill)}, decode on "
        f"{cluster.device_of(cluster.decode)}; {model.words}; chunks of "
        f"{options.max_num_batched_tokens} tokens; lane {cluster.lane()}"
    )
