"""What `kvxfer bench simulate` may be told. The load has the names and defaults of `kvxfer bench
serving`, what is of workers has the names of `kvxfer serve`.

Annotations are objects here, not text: the command line evaluates them.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvxfer.bench.serving.options import ServingOptions
from kvxfer.bench.simulate.costs import Costs
from kvxfer.bench.simulate.shape import ClusterShape
from kvxfer.config import Commit
from kvxfer.errors import KvxferError, UsageError

GPU_COSTS = Path(__file__).parent / "gpu.json"
LARGEST = 100_000
"""Workers of a role: beyond it a run would never end."""
LOAD = (
    *("num_prompts", "random_input_len", "random_output_len", "random_range_ratio"),
    *("trace", "trace_speed", "trace_scale", "request_rate", "burstiness", "max_concurrency"),
    *("seed", "goodput"),
)
"""Options that mean what they mean to `kvxfer bench serving`."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The cluster, the load on it, and what is told."""

    costs: Path = GPU_COSTS
    """What everything costs (default: one H200 per worker, a model of 8 billion parameters: the
    file says which numbers were measured, and which are assumed). `simulate calibrate` writes one
    of this machine."""
    prefill: int = 4
    """Prefill workers."""
    decode: int = 4
    """Decode workers."""
    routers: int = 1
    """Routers, each with an equal part of the requests; what one gives to a worker the others know
    at once, where real ones learn of it with the worker's next Status."""
    cores: int = 0
    """CPU cores that all processes share, the client too (0: no thread waits for one)."""
    max_num_batched_tokens: int = 2048
    """Tokens of one prefill chunk."""
    max_num_seqs: int = 256
    """Most sequences in one decode step."""
    max_num_queued_seqs: int = 1024
    """Most prompts of a decode worker that wait: one more is refused."""
    block_size: int = 16
    """Tokens per block."""
    kv_cache_memory_bytes: int = 64 << 30
    """Bytes of KV cache of each worker."""
    kv_commit: Commit = "all"
    """elastic: a sixteenth of it at first, and more as blocks run low."""
    kv_low_watermark: float = 0.1
    """Elastic: grow when a smaller share of the blocks than this is free."""
    peer_timeout_s: float = 5.0
    """Heartbeats come six times as often."""
    workers_per_link: int = 1
    """Workers of a role that share a link, as those of a host do its network card."""
    assume: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)] = ()
    """Costs that are other than the file says, as in lane_bytes_per_s=50e9 for a network card."""
    fabric_gbps: float = 0.0
    """GB/s of all links together (0: no bound)."""
    num_prompts: int = 1000
    """Requests; of a trace at most so many."""
    random_input_len: int = 1024
    """Tokens of a prompt."""
    random_output_len: int = 128
    """Tokens of an answer."""
    random_range_ratio: float = 0.0
    """Both lengths are uniform in [length * (1 - ratio), length * (1 + ratio)]; in [0, 1)."""
    trace: Path | None = None
    """JSON lines with timestamp (ms), input_length and output_length, as Mooncake's traces have
    them. What prompts have in common is not modelled: each is computed whole."""
    trace_speed: float = 1.0
    """The trace's clock: 2 sends it in half its time."""
    trace_scale: float = 1.0
    """The trace's lengths times this."""
    request_rate: float = math.inf
    """Open loop: requests a second. inf sends all at once, or as --max-concurrency lets them."""
    burstiness: float = 1.0
    """Of the pauses between requests: 1 is a Poisson process, less is burstier."""
    max_concurrency: int = 0
    """Closed loop: most requests under way (0: any number)."""
    seed: int = 0
    """Of lengths, pauses and choices: the same seed gives the same numbers."""
    find_ratio: bool = False
    """Divide the same number of workers between prefill and decode in every way that matters, and
    say which serves this load best: most goodput, else the quickest first token."""
    steps: int = 9
    """Ways that are tried with --find-ratio."""
    goodput: Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=True)] = ()
    """Limits in ms, as in ttft:2000 tpot:50: goodput is how many requests a second keep them."""
    plot: Path | None = None
    """With --find-ratio: draw it, as .svg or .png."""
    json: Path | None = None
    """Keep the figures in this file."""

    def load(self) -> ServingOptions:
        """The same load as `kvxfer bench serving` knows it. Raises UsageError."""
        same = {name: getattr(self, name) for name in LOAD}
        found = ServingOptions(base_url="http://simulated", **same)
        found.check()
        return found

    def shape(self, costs: Costs) -> ClusterShape:
        """Raises UsageError."""
        for name in ("prefill", "decode"):
            if not 1 <= getattr(self, name) <= LARGEST:
                reason = f"must be in [1, {LARGEST}]"
                raise UsageError(name, getattr(self, name), reason)
        block_bytes = costs.kv_token_bytes * max(1, self.block_size)
        blocks = int(self.kv_cache_memory_bytes // block_bytes)
        if blocks < 1:
            reason = f"must hold a block: {block_bytes:g} bytes"
            raise UsageError("kv_cache_memory_bytes", self.kv_cache_memory_bytes, reason)
        return ClusterShape(
            prefill=self.prefill,
            decode=self.decode,
            routers=self.routers,
            cores=self.cores,
            chunk_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_num_queued=self.max_num_queued_seqs,
            block_size=self.block_size,
            prefill_blocks=blocks,
            decode_blocks=blocks,
            is_elastic=self.kv_commit == "elastic",
            low_watermark=self.kv_low_watermark,
            workers_per_link=self.workers_per_link,
            fabric_bytes_per_s=self.fabric_gbps * 1e9,
            peer_timeout_s=self.peer_timeout_s,
            max_concurrency=self.max_concurrency,
        )

    def check(self) -> None:
        """Before anything is computed. Raises UsageError."""
        self.load()
        need_simpy()
        if self.steps < 1:
            raise UsageError("steps", self.steps, "must be at least 1")
        if self.find_ratio and self.prefill + self.decode < 3:
            workers = self.prefill + self.decode
            raise UsageError("find_ratio", workers, "3 workers at least can be divided in two ways")
        if self.plot is not None:
            from kvxfer.bench.simulate.plot import check_plot

            if not self.find_ratio:
                raise UsageError("plot", str(self.plot), "goes with --find-ratio")
            check_plot(self.plot)


def need_simpy() -> None:
    """Raises KvxferError where it is missing."""
    try:
        import simpy  # noqa: F401
    except ImportError:
        raise KvxferError("simpy is missing: pip install 'kvxfer[bench]'") from None


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """A real service on this machine: one load to fit the costs to, other loads to try them on."""

    model: Path | None = None
    """Hugging Face directory of a model (default: the bundled one)."""
    out: Path = Path("costs.json")
    """Where the costs go."""
    costs: Path | None = None
    """`validate`: costs that were fitted before (default: fit them now)."""
    repeats: int = 3
    """Times that each load of `validate` is given."""
    seconds: float = 15.0
    """`validate`: how long each load comes."""
    log_dir: Path | None = None
    """Keep the logs of the services (default: they are deleted)."""
    json: Path | None = None
    """Keep the figures in this file."""

    def check(self) -> None:
        """Raises UsageError."""
        if self.repeats < 1:
            raise UsageError("repeats", self.repeats, "must be at least 1")
        if not 1 <= self.seconds < math.inf:
            raise UsageError("seconds", self.seconds, "must be at least 1 and finite")
        if self.model is not None and not (self.model / "config.json").is_file():
            raise UsageError("model", str(self.model), "is no directory of a model")
