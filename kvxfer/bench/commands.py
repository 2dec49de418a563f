"""`kvxfer bench`: its commands. Each imports what it runs when it runs."""

from __future__ import annotations

from pathlib import Path

import cyclopts

from kvxfer.bench.beside import BesideOptions
from kvxfer.bench.buffer import BufferOptions
from kvxfer.bench.buffer_plot import BufferPlotOptions
from kvxfer.bench.compare import CompareOptions
from kvxfer.bench.connectors.options import ConnectorsOptions
from kvxfer.bench.control import ControlOptions
from kvxfer.bench.growth import GrowthOptions
from kvxfer.bench.hosts import HostsOptions
from kvxfer.bench.identity import IdentityOptions
from kvxfer.bench.layouts import LayoutsOptions
from kvxfer.bench.namespaces import NamespacesOptions
from kvxfer.bench.readme import ReadmeOptions
from kvxfer.bench.residency import ResidencyOptions
from kvxfer.bench.scale import ScaleOptions
from kvxfer.bench.serving.options import ServingOptions
from kvxfer.bench.serving_overhead import ServingOverheadOptions
from kvxfer.bench.share import ShareOptions
from kvxfer.bench.simulate.commands import simulate
from kvxfer.bench.soak import SoakOptions
from kvxfer.bench.stress import StressOptions
from kvxfer.bench.tokens import TokensOptions
from kvxfer.bench.transfer import TransferOptions
from kvxfer.bench.vllm.options import VllmOptions

bench = cyclopts.App(name="bench", help="Measure, with verified data.")
bench.command(simulate)


@bench.command
def growth(options: GrowthOptions = GrowthOptions()) -> int:  # noqa: B008
    """What growing, shrinking and sleeping cost a worker and its peer, step by step.

    By lane and size, and what it does to transfers in flight. Every byte is compared. Exit code 1
    where a bar is missed, a byte is wrong, or a worker dies.
    Example: kvxfer bench growth --connectors nixl,peer --sizes 64 256 --json growth.json
    """
    from kvxfer.bench.growth import run_growth

    return run_growth(options)


@bench.command
def layouts(options: LayoutsOptions = LayoutsOptions()) -> int:  # noqa: B008
    """The time of a decode step in each of the six cache layouts, as a ratio to the best.

    Exit code 1 if the layouts do not give the same tokens.
    Example, on a GPU: kvxfer bench layouts --contexts 1024 --contexts 8192 --json layouts.json
    """
    from kvxfer.bench.layouts import run_layouts

    return run_layouts(options)


@bench.command
def stress(options: StressOptions = StressOptions()) -> int:  # noqa: B008
    """A load that takes much memory late, on a cache sized by an estimate and on one that grew.

    Speculative decoding with a drafting model: its graphs, logits and sampling workspaces. The
    fixed cache is tried at its usual share of the device, then at less, until the load survives.
    Run again after it was cut short, it goes on where it was.
    Example, on a GPU: kvxfer bench stress --json stress.json
    """
    from kvxfer.bench.stress import run_stress

    return run_stress(options)


@bench.command
def share(options: ShareOptions = ShareOptions()) -> int:  # noqa: B008
    """The growable cache's size as a share of the largest with which the same load survives.

    Exit code 1 below 0.97.
    Example, on a GPU: kvxfer bench share --resolution-mib 128 --json share.json
    """
    from kvxfer.bench.share import run_share

    return run_share(options)


@bench.command
def identity(options: IdentityOptions = IdentityOptions()) -> int:  # noqa: B008
    """Whether a cache that grows, sleeps or was told its size gives the bytes of a fixed one.

    Exit code 1 if a token or a block of the prompts' KV differs.
    Example: kvxfer bench identity --device cuda --json identity.json
    """
    from kvxfer.bench.identity import run_identity

    return run_identity(options)


@bench.command
def namespaces(options: NamespacesOptions = NamespacesOptions()) -> int:  # noqa: B008
    """How well a hand-over uses a slow link between two hosts: here, between network namespaces.

    Needs root. Exit code 1 where a bar is missed or a byte is wrong.
    Example: kvxfer bench namespaces --json namespaces.json
    """
    from kvxfer.bench.namespaces import run_namespaces

    return run_namespaces(options)


@bench.command
def hosts(options: HostsOptions = HostsOptions()) -> int:  # noqa: B008
    """What a hand-over between hosts takes by length of frames, and when packets are lost.

    Hosts are network namespaces here. Needs root. Exit code 1 where KV or a token is wrong.
    Example: kvxfer bench hosts --json tests/bench/results/scale-hosts.json
    """
    from kvxfer.bench.hosts import run_hosts

    return run_hosts(options)


@bench.command
def residency(options: ResidencyOptions = ResidencyOptions()) -> int:  # noqa: B008
    """Random growing, shrinking, sleeping, waking and packing, and what was lost or leaked by it.

    Exit code 1 if anything was.
    Example: kvxfer bench residency --device cuda --steps 1000 --json residency.json
    """
    from kvxfer.bench.residency import run_residency

    return run_residency(options)


@bench.command
def buffer(options: BufferOptions = BufferOptions()) -> int:  # noqa: B008
    """Which fraction of warm-up's transient peak a long mixed load needs beyond it.

    Logs what is held besides the KV, fits the fraction, tries it, and draws it (with matplotlib).
    Example, on a GPU: kvxfer bench buffer --minutes 10 --json buffer.json
    """
    from kvxfer.bench.buffer import run_buffer

    return run_buffer(options)


@bench.command
def buffer_plot(options: BufferPlotOptions) -> int:
    """Draw what `kvxfer bench buffer` logged, anywhere, later.

    Example: kvxfer bench buffer-plot --samples buffer.jsonl --out buffer.svg
    """
    from kvxfer.bench.buffer_plot import run_buffer_plot

    return run_buffer_plot(options)


@bench.command
def tokens(options: TokensOptions = TokensOptions()) -> int:  # noqa: B008
    """What a hand-over adds to a prompt's first two tokens, and where that time goes.

    Exit code 1 where a bar is missed or an answer is wrong.
    Example, on two GPUs: kvxfer bench tokens --json tests/bench/results/transfer-tokens.json
    """
    from kvxfer.bench.tokens import run_tokens

    return run_tokens(options)


@bench.command
def beside(options: BesideOptions = BesideOptions()) -> int:  # noqa: B008
    """What KV that moves in the background costs decode's tokens and prefill's chunks.

    Exit code 1 where a bar is missed or a byte is wrong.
    Example, on two GPUs: kvxfer bench beside --json tests/bench/results/transfer-beside.json
    """
    from kvxfer.bench.beside import run_beside

    return run_beside(options)


@bench.command
def control(options: ControlOptions = ControlOptions()) -> int:  # noqa: B008
    """What a hand-over costs besides the model and the bytes: its latency, and how many a second.

    Exit code 1 where a bar is missed.
    Example: kvxfer bench control --json tests/bench/results/control-cost.json
    """
    from kvxfer.bench.control import run_control

    return run_control(options)


@bench.command
def scale(options: ScaleOptions = ScaleOptions()) -> int:  # noqa: B008
    """One worker with many peers, which are simulated: how late they hear that it has grown, how
    long a storm of registrations takes, and what CPU that and their heartbeats cost.

    Exit code 1 where a bar is missed, an update was not told or a peer was lost.
    Example: kvxfer bench scale --peers 64 --json tests/bench/results/scale-control.json
    """
    from kvxfer.bench.scale import run_scale

    return run_scale(options)


@bench.command
def serving(options: ServingOptions = ServingOptions()) -> int:  # noqa: B008
    """Load on an OpenAI-compatible service: TTFT, inter-token latency, throughput, goodput.

    Open loop (--request-rate) or closed (--max-concurrency), with random lengths or those of a
    trace, on a service that runs (--base-url) or on `kvxfer serve`, started here, which may be
    compared with a single process. Options are those of `vllm bench serve` where they mean the
    same. Exit code 1 if a request failed or an answer is wrong; what was found is kept.
    Example: kvxfer bench serving --base-url http://127.0.0.1:8000 --request-rate 4
    Example: kvxfer bench serving --model DIR --compare-single --max-concurrency 8 --json s.json
    """
    from kvxfer.bench.serving.run import run_serving

    return run_serving(options)


@bench.command
def serving_overhead(options: ServingOverheadOptions = ServingOverheadOptions()) -> int:  # noqa: B008
    """Measure what the HTTP front adds, and many streams at once, on the host, without a model.

    Example: kvxfer bench serving-overhead --json tests/bench/results/serve-overhead.json
    """
    from kvxfer.bench.serving_overhead import run_serving_overhead

    return run_serving_overhead(options)


@bench.command
def connectors(options: ConnectorsOptions = ConnectorsOptions()) -> int:  # noqa: B008
    """Which connector moves KV best here, and how near it comes to what the machine can do.

    Every connector, operation, block size and batch between two processes, with every byte
    checked, next to the machine's own copy and a plain socket. Exit code 1 where something was not
    measured as a whole; what was found is kept. nixlbench's option names are taken too.
    Example: kvxfer bench connectors --start_block_size 4096 --max_block_size 1048576
    --json connectors.json
    """
    from kvxfer.bench.connectors.run import run_connectors

    return run_connectors(options)


@bench.command
def soak(options: SoakOptions = SoakOptions()) -> int:  # noqa: B008
    """Many hand-overs while both caches grow, shrink and sleep: what was wrong, lost or leaked.

    By NIXL, by `peer` and by both. Exit code 1 if anything was wrong, lost or leaked.
    Example: kvxfer bench soak --hand-overs 100000 --json tests/bench/results/control-soak.json
    """
    from kvxfer.bench.soak import run_soak

    return run_soak(options)


@bench.command
def compare(a: Path, b: Path, options: CompareOptions = CompareOptions()) -> int:  # noqa: B008
    """Tell what became slower or quicker from file A to file B, beyond the noise seen.

    Both are reports of `kvxfer bench connectors`, or figures that any other bench wrote. Exit code
    1 with a regression, 2 where they did not measure the same.
    Example: kvxfer bench compare before.json after.json
    """
    from kvxfer.bench.compare import run_compare

    return run_compare(a, b, options)


@bench.command
def readme(options: ReadmeOptions = ReadmeOptions()) -> int:  # noqa: B008
    """Write README.md's performance section from the figures that are kept in the repository.

    Example: kvxfer bench readme --check
    """
    from kvxfer.bench.readme import run_readme

    return run_readme(options)


@bench.command
def transfer(case: str, options: TransferOptions = TransferOptions()) -> int:  # noqa: B008
    """How fast KV moves between two processes, as a share of what the machine can do.

    CASE is one of peer-nvlink, peer-layouts, peer-vs-nixl, peer-one-gpu, nixl-growable, peer-host
    and nixl-overhead, or all. Every byte is checked. Exit code 1 where a bar is missed or a byte is
    wrong.
    Example, on two GPUs: kvxfer bench transfer all --json-dir tests/bench/results
    """
    from kvxfer.bench.transfer import run_transfer

    return run_transfer(case, options)


@bench.command
def vllm(options: VllmOptions) -> int:
    """vLLM's engines hand over KV: by KvxferConnector and by vLLM's NixlConnector, side by side.

    Tokens compared with one engine's, KV by digest. Exit code 1 where any is wrong, or a block
    stays held. vLLM lives in an environment of its own: deploy/vllm.sh makes it and runs this.
    Example: kvxfer bench vllm --vllm-python .vllm-venv/bin/python --json vllm.json
    """
    from kvxfer.bench.vllm.run import run_vllm

    return run_vllm(options)
