"""What `kvxfer bench connectors` may be told. Lists are comma-separated; sizes are bytes, or KiB,
MiB and GiB with their unit. Names that nixlbench has too mean the same, with '_' as with '-'."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorsOptions:
    """What is moved, how often, between which memories, and where the findings go."""

    connectors: str = ""
    """Modules of connectors/ (default: all that work here). NAME:VARIABLE=VALUE measures one with
    that in its processes' environment, such as nixl:UCX_TLS=tcp."""
    block_sizes: str = ""
    """Bytes of a block that lie side by side at both ends (default: 4KiB,64KiB,1MiB)."""
    start_block_size: str = ""
    """With --max-block-size, instead of --block-sizes: from this one on, doubling."""
    max_block_size: str = ""
    """The last of them."""
    batch_sizes: str = ""
    """Blocks of a transfer (default: 1,16)."""
    start_batch_size: int = 0
    """With --max-batch-size, instead of --batch-sizes: from this one on, doubling."""
    max_batch_size: int = 0
    """The last of them."""
    op_type: str = "WRITE,READ"
    """WRITE: the source pushes; READ: the target pulls."""
    modes: str = "direct,staged"
    """direct: from cache to cache; staged: through memory that is not the cache's. It is the
    connector that goes the one way or the other."""
    layouts: str = "LBHNC"
    """Of both caches, or SOURCE:TARGET, such as LBHNC:BLHNC."""
    tensor_parallel_sizes: str = "1"
    """Of both sides, or SOURCE:TARGET: the first rank of each moves the heads that both have."""
    chunk_sizes: str = "64MiB"
    """The largest chunks that the caches' memory is committed in; fixed: one plain allocation, no
    memory that grows."""
    initiator_seg_type: str = ""
    """DRAM or VRAM, of who starts a transfer (default: VRAM where there is a GPU)."""
    target_seg_type: str = ""
    """Of the other side. Where both list several, each of the one is measured with each of the
    other."""
    devices: str = ""
    """The GPUs of initiator and target (default: cuda:0,cuda:1; cuda:0 twice where it is alone)."""
    num_layers: int = 4
    """Of the caches: a block has as many pages. nixlbench has none of them: it is as 1."""
    num_kv_heads: int = 8
    """Of the caches, at the most; as many where heads lie outside the blocks."""
    total_buffer_size: str = ""
    """Committed memory of each cache, in which blocks lie at random places (default: twice what
    moves)."""
    num_iter: int = 20
    """Transfers measured of each kind. p99 and p999 of fewer than 100 and 1,000 are their maximum.
    """
    warmup_iter: int = 3
    """Transfers of each kind before, which are not."""
    check_consistency: bool = True
    """Erase the target's blocks before each transfer, and compare every byte after it."""
    backend: str = "UCX"
    """Plugin of NIXL that the connector nixl uses."""
    peer: str = ""
    """Measure towards another machine: the address of a `kvxfer bench connectors --listen`, such as
    tcp://10.0.0.2:5700#NAME. This side is the source."""
    listen: str = ""
    """Be the other machine: serve, at this address, those who measure, one after the other."""
    key_file: Path | None = None
    """Our secret key, of `kvxfer keygen`: needed, with --peer-keys, for all but loopback."""
    peer_keys: Path | None = None
    """Directory of the public keys of those whom we talk to."""
    json: Path | None = None
    """Keep the report in this file, from the first row on."""
    csv: Path | None = None
    """Keep the rows in this file, from the first one on."""
    figures: Path | None = None
    """Keep each kind's rate and share of the machine's own copy in this file, as the other benches
    keep their figures."""
    bar: float = 0.0
    """What every kind's share is to reach: exit code 1 where one does not (0: nothing)."""
    html: Path | None = None
    """Draw the report in this file, which needs no other."""
    compare: tuple[Path, Path] | None = None
    """Measure nothing: tell what became of the first report's kinds in the second, beyond the noise
    seen."""
