"""`kvxfer bench beside`: what KV that moves in the background costs those who compute.

Two processes with a worker's engine, connectors and threads each. One prefills a chunk over and
over, the other decodes a batch; between them KV moves, of blocks that neither uses, at a pace and
as fast as it can. Each stretch of that has a quiet one before it, and ratios are of neighbours.
Every moved byte, and every token of either, is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from kvxfer.config import KV_STREAM_BYTES
from kvxfer.errors import UsageError

if TYPE_CHECKING:
    from kvxfer.bench.token_model import TokenModel
    from kvxfer.bench.token_phase import EngineSetup
    from kvxfer.transfer.lanes import Lane

GPU_KV_MIB, HOST_KV_MIB = 6144, 128


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class BesideOptions:
    """What `kvxfer bench beside` may be told."""

    devices: str = "auto"
    """Prefill's and decode's, such as cuda:0,cuda:1 or cpu,cpu (auto: two GPUs, one twice, or the
    host, whichever is there). On one device both disturb each other, quiet or not."""
    model: Path | None = None
    """Directory of a decoder-only model (default: random weights with the KV of Llama 3 8B; on the
    CPU the bundled model)."""
    intermediate_size: int = 8192
    """Of the random model's MLPs."""
    keep_model: Annotated[Path | None, Parameter(negative=())] = None
    """Write the random model to this directory, or use the one that an earlier run left there."""
    gbps: float = 10.0
    """The pace, in GB/s."""
    rounds: int = 5
    """Each a quiet phase, one at the pace, a quiet one, one as fast as it can."""
    seconds: float = 4.0
    """That count, of each phase."""
    settle_s: float = 0.3
    """Before that in each phase, and after it."""
    sequences: int = 8
    """Decoded at once."""
    context_tokens: int = 2048
    """Of each sequence, where decode begins."""
    cycle_tokens: int = 1024
    """That it decodes before it begins again."""
    max_num_batched_tokens: int = 2048
    """Tokens of the prefill chunk, and of each set of blocks that moves."""
    sets: int = 4
    """Sets of blocks that move, in turn."""
    in_flight: int = 3
    """Transfers under way at once, at the most."""
    kv_stream_bytes: int = KV_STREAM_BYTES
    """Bytes that a transfer at the pace has at least, as the workers' option of that name. As fast
    as it can, a transfer is a whole set."""
    block_size: int = 16
    """Tokens per block."""
    kv_cache_layout: str = "auto"
    """Of both caches."""
    connector: str = "peer,nixl"
    """Modules of connectors/ that may move KV; the first lane that works is used."""
    lane: str = "auto"
    """push, pull or auto."""
    kv_mib: int = 0
    """MiB of each cache (default: 6,144; on the CPU 128)."""
    threads: int = 1
    """CPU threads of each model."""
    json: Path | None = None
    """Keep the figures in this file."""


def run_beside(options: BesideOptions) -> int:
    """Measure, print, write; 1 when a bar was missed or a byte is wrong. Raises KvxferError."""
    from kvxfer.bench.record import Record, command_line
    from kvxfer.bench.report import describe_machine
    from kvxfer.bench.token_figures import beside_figures
    from kvxfer.bench.token_model import check_lengths, token_model
    from kvxfer.bench.token_pair import Beside, engine_pair, measure
    from kvxfer.bench.transfer_devices import resolve_devices

    _check(options)
    devices = resolve_devices(options.devices)
    record = Record(options.json, command_line("beside", options))
    told = options.model, devices[0], options.intermediate_size, options.keep_model
    with token_model(*told) as model:
        check_lengths(model.info, options.context_tokens, options.cycle_tokens)
        check_lengths(model.info, options.max_num_batched_tokens, 0)
        setup = _setup(options, model, devices[0])
        with engine_pair(devices, setup) as (pair, lane):
            words = _words(options, devices, model, lane)
            record.machine = f"{describe_machine(devices[0])}; {words}"
            print(record.machine, flush=True)
            found = Beside()
            try:
                measure(pair, options, found)
            finally:
                if found.noise.gbps:  # a run that was cut short keeps its whole rounds
                    record.add(*beside_figures(found, options.gbps))
    return record.exit_code


def _check(options: BesideOptions) -> None:
    counts = ("rounds", "sequences", "context_tokens", "cycle_tokens", "in_flight", "threads")
    for name in (*counts, "block_size", "max_num_batched_tokens", "kv_stream_bytes"):
        if getattr(options, name) < 1:
            raise UsageError(name, getattr(options, name), "must be at least 1")
    if options.sets < 2:
        raise UsageError("sets", options.sets, "must be at least 2: one moves while another lands")
    for name in ("gbps", "seconds"):
        if not getattr(options, name) > 0:
            raise UsageError(name, getattr(options, name), "must be positive")
    for name in ("settle_s", "kv_mib"):
        if getattr(options, name) < 0:
            raise UsageError(name, getattr(options, name), "is negative")


def _setup(options: BesideOptions, model: TokenModel, device: str) -> EngineSetup:
    from kvxfer.bench.token_phase import EngineSetup

    kv_mib = options.kv_mib or (HOST_KV_MIB if device == "cpu" else GPU_KV_MIB)
    return EngineSetup(
        model=model.info.model_dir.resolve(),
        kv_bytes=kv_mib << 20,
        block_size=options.block_size,
        layout=options.kv_cache_layout,
        connector=options.connector,
        lane=options.lane,
        threads=options.threads,
        chunk_tokens=options.max_num_batched_tokens,
        kv_stream_bytes=options.kv_stream_bytes,
        sequences=options.sequences,
        context_tokens=options.context_tokens,
        cycle_tokens=options.cycle_tokens,
        sets=options.sets,
        in_flight=options.in_flight,
    )


def _words(options: BesideOptions, devices: tuple[str, str], model: TokenModel, lane: Lane) -> str:
    """What was measured, and where."""
    return (
        f"prefill on {devices[0]}, decode on {devices[1]}; {model.words}; {options.sequences} "
        f"sequences decoding, chunks of {options.max_num_batched_tokens} tokens; lane {lane}"
    )
