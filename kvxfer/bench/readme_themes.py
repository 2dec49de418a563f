"""What README.md's performance section shows of the figures that are kept: words, and no numbers.

A pattern is matched with a metric's whole name; \\1 … in a label are its groups. One that matches
nothing is an error, so that what a reader was told about cannot vanish.
"""

from __future__ import annotations

from kvxfer.bench.readme_parts import Counts, Line, List, Matrix, Theme

_LANES = (
    ("transfer-peer-nvlink", "peer over NVLink {size}", "`peer`, two GPUs joined by NVLink"),
    ("transfer-peer-one-gpu", "peer within a GPU {size}", "`peer`, two processes on one GPU"),
    ("transfer-peer-host", "peer on the host {size}", "`peer`, two processes on the host"),
    ("transfer-nixl-growable", "nixl pull, growable {size}", "`nixl` pull, two GPUs"),
    ("transfer-nixl-growable", "staged pull, growable {size}", "`staged` pull, two GPUs"),
    ("transfer-nixl-growable", "staged push, growable {size}", "`staged` push, two GPUs"),
)

TRANSFER = Theme(
    "Transfer rate",
    "Between growable caches in two processes, blocks at random places, by the size of the runs "
    "that are contiguous on both sides; every byte is checked. The share is that of one contiguous "
    "copy of as many bytes, made in turns with the transfers.",
    (
        Matrix(
            "share of a contiguous copy",
            tuple(Line(f, f"{m}: share of a contiguous copy", text) for f, m, text in _LANES),
        ),
        Matrix("GB/s", tuple(Line(f, f"{m}: rate", text) for f, m, text in _LANES)),
        List(
            (
                Line(
                    "transfer-peer-vs-nixl",
                    r"peer against NIXL on fixed memory (\w+): ratio",
                    r"`peer` to NIXL on plain `cudaMalloc` memory, runs of \1",
                ),
                Line(
                    "transfer-peer-layouts",
                    r"peer layouts: (the worst pair .* to the quickest equal pair .*)",
                    r"`peer`, all pairs of layouts: \1",
                ),
                Line(
                    "transfer-nixl-overhead",
                    r"NIXL host push (\w+): our connector to (bare, no progress thread)",
                    r"`nixl` push on the host to NIXL \2, runs of \1",
                ),
                Line(
                    "transfer-namespaces",
                    r"hand-over, NIXL (\w+): (share of .*)",
                    r"hand-over between network namespaces, `nixl` \1: \2",
                ),
                Line(
                    "transfer-namespaces",
                    r"hand-over by (\w+) while prefill runs: exposed by last piece alone",
                    r"… \1 while prefill runs: wait after it, to the last piece's own time",
                ),
                Line(
                    "transfer-growth-overlap",
                    r"(\w+), growth of (.*): p95 of overlapping transfers to that of others",
                    r"`\1`, transfers while \2 are added to the source: p95 to that of others",
                ),
            )
        ),
    ),
)

_Lanes = tuple[tuple[str, str], ...]
"""The connector and operation as metrics have them, and the memory that is left out of them."""


def _side_by_side(file: str, where: str, copy: str, batch: int, lanes: _Lanes) -> list[Matrix]:
    """Shares and rates of `lanes`, of transfers of `batch` blocks."""
    found = []
    for caption, value in (("GB/s", "rate"), (f"share of {copy}", f"share of {copy}")):
        lines = [
            Line(
                file,
                f"{lane}, {where}, LBHNC>LBHNC, {memory}, {batch} × {{size}}: {value}",
                f"`{lane}`, {memory}",
            )
            for lane, memory in lanes
        ]
        found.append(Matrix(caption, tuple(lines)))
    return found


_GROWABLE, _FIXED = "chunks of 64MiB", "fixed memory"
_ON_HOST = tuple(
    (f"{name} {operation}", _GROWABLE)
    for name in ("nixl", "peer", "staged", "mooncake", "offload")
    for operation in ("WRITE", "READ")
    if (name, operation) != ("peer", "WRITE")
)
_ON_ONE_GPU = (
    ("nixl READ", _FIXED),
    ("nixl READ", _GROWABLE),
    ("nixl:UCX_RMA_PPLN_ENABLE=n READ", _GROWABLE),
    ("staged READ", _GROWABLE),
    ("peer READ", _GROWABLE),
)
CONNECTORS = Theme(
    "Connectors side by side",
    "As `kvxfer bench connectors` measures them: blocks of four layers at random places, by what "
    "lies side by side of a block in a layer. WRITE is a push and READ a pull. First 16 blocks "
    "a transfer between two processes on the host, then 64 within one GPU.",
    (
        *_side_by_side("bench-connectors-cpu", "DRAM to DRAM", "memcpy", 16, _ON_HOST),
        *_side_by_side("bench-connectors-one-gpu", "VRAM to VRAM", "device copy", 64, _ON_ONE_GPU),
    ),
)


def _growth(file: str, sizes: tuple[str, ...], lanes: tuple[str, ...]) -> list[Matrix]:
    """Times of `lanes`, with what a growth does to those of transfers under way."""
    shown = (
        ("ms until new memory is usable", "growth: until usable"),
        ("ms until a transfer into it is verified", "growth: until the first verified transfer"),
        ("p95 of transfers meanwhile, to that before and after",
         "transfers in flight, the far end grows: p95 of time during to before and after"),
        ("ms to shrink back", "shrink: all"),
        ("ms from sleep until usable", "wake: until usable"),
    )  # fmt: skip
    return [
        Matrix(
            caption,
            tuple(Line(file, f"{lane} {{size}}: {metric}", f"`{lane}`") for lane in lanes),
            sizes,
        )
        for caption, metric in shown
    ]


GROWTH = Theme(
    "Growth, step by step",
    "`kvxfer bench growth`: a cache grows by so much while a peer moves KV into and out of it; "
    "usable is committed, registered, told to the peer and acknowledged. On the host, then on one "
    "GPU.",
    (
        *_growth(
            "bench-growth-cpu",
            ("16 MiB", "64 MiB", "256 MiB"),
            ("peer/pull", "nixl/push", "nixl/pull", "staged/push", "staged/pull"),
        ),
        *_growth(
            "bench-growth-one-gpu",
            ("1024 MiB", "8192 MiB"),
            ("peer/pull", "nixl/pull", "staged/pull"),
        ),
    ),
)

HAND_OVER = Theme(
    "Hand-over",
    "What handing a prompt over costs besides the model, and what KV under way costs others.",
    (
        List(
            (
                Line("control-cost", r"control: (accepted to Done, p\d+)", r"without a model: \1"),
                Line("control-cost", r"control: hand-overs of a pair", "… hand-overs of one pair"),
                Line("transfer-tokens", r"added time to the (.*)", r"added to the \1, two GPUs"),
                Line("transfer-tokens", r"(prompts whose KV differs)", r"… \1"),
                Line("transfer-tokens", r"(answers' first other token.*)", r"… \1"),
                Line("transfer-beside", r"(inter-token p99 beside KV.*)", r"decode: \1"),
                Line("transfer-beside", r"(prefill's time beside KV.*)", r"\1"),
                Line("transfer-beside", r"(sets of blocks .*|steps with .*)", r"… \1"),
            )
        ),
    ),
)

LOAD = Theme(
    "Load",
    "`kvxfer bench serving`: the bundled model on two cores, one prefill and one decode worker "
    "against a single process that has both cores; each alone on the machine.",
    (
        List(
            (
                Line("bench-serving-cpu", r"serving, (P/D|single): (ttft, (?:median|p99))",
                     r"\1: \2"),
                Line("bench-serving-cpu", r"serving, (P/D|single): (itl, (?:median|p99))",
                     r"\1: \2"),
                Line("bench-serving-cpu", r"serving, (P/D|single): (throughput, output tokens)",
                     r"\1: \2"),
                Line("bench-serving-cpu", r"serving, (P/D|single): (goodput, requests)",
                     r"\1: \2"),
                Line("bench-serving-cpu", r"serving, P/D: (KV hand-over, .*)", r"\1"),
                Line("bench-serving-cpu", r"serving, (verified: .*|P/D: of .* failed)", r"\1"),
            )
        ),
    ),
)  # fmt: skip

SERVING = Theme(
    "The HTTP front",
    "Without a model: the router alone, with a pair of workers, and many streams at once.",
    (List((Line("serve-overhead", r"serve: (.*)", r"\1"),)),),
)


def _thousand(file: str, routers: str) -> tuple[Line, ...]:
    of = r"simulated, 500 : 500: "
    label = f"1,000 workers, {routers}: "
    return (
        Line(file, of + r"(ttft, median|throughput, requests)", label + r"\1"),
        Line(file, of + r"use of (router|prefill: control thread|prefill: model|links out of .*"
             r"|decode: model.*|decode: cache)", label + r"use of \1"),
    )  # fmt: skip


SCALE = Theme(
    "Many workers",
    "One worker with simulated peers; a model of many, how far it is off a real service on two "
    "cores, and what it says of 1,000 workers and of 16 in different ratios. A GPU's costs are put "
    "together from figures here and from assumptions (`kvxfer bench simulate costs`).",
    (
        List(
            (
                Line("scale-control", r"scale, (64 peers): (RegionsUpdate.*p99|updates not told"
                     r"|peers lost|CPU of the worker, heartbeats)", r"\1: \2"),
                Line("scale-simulate", r"simulate, (.*): ((?:TTFT p50|throughput), relative error)",
                     r"model, \1: \2"),
                *_thousand("scale-1000-workers", "100 routers"),
                *_thousand("scale-1000-workers-20-routers", "20 routers"),
                Line("scale-ratio", r"simulated, (\d+ : \d+): goodput, requests",
                     r"30 requests a second, \1 workers: goodput"),
            )
        ),
    ),
)  # fmt: skip

MEMORY = Theme(
    "Memory",
    "How quickly a cache grows, and how near its measured size comes to the largest that survives "
    "the same load. `stress` is speculative decoding, whose logits and workspaces come after "
    "profiling: a fixed cache is sized by an estimate, and by less until the load survives.",
    (
        List(
            (
                Line("memory-growth", r"(.*)", r"growth: \1"),
                Line("memory-share", r"share_of_largest_surviving_kv",
                     "measured size, as a share of the largest that survives"),
                Line("memory-stress", r"stress_growable_survives", "stress: growable survives"),
                Line("memory-stress", r"stress_fixed_(\d)(\d+)_survives",
                     r"… fixed at a utilisation of \1.\2 survives"),
                Line("memory-stress", r"stress_fixed_lowered_utilization",
                     "… first lower utilisation at which fixed survives"),
                Line("memory-stress", r"stress_tokens_ratio",
                     "… KV of growable to KV of fixed at that"),
                Line("memory-stress", r"stress_outputs_equal", "… same tokens"),
                Line("memory-buffer", r"buffer_fitted_fraction",
                     "mixed load: growth of what is not KV, as a share of warm-up's peak"),
                Line("memory-buffer", r"buffer_least_fraction_confirmed",
                     "… least share kept free with which it survives"),
                Line("memory-identity", r"same tokens and KV as a fixed cache: (.*)",
                     r"tokens and KV of a fixed cache: \1"),
                Line("memory-residency", r"(blocks that .*|memory that .*|descriptors .*)",
                     r"random growing, shrinking, sleeping, packing: \1"),
                Line("memory-layouts", r"layouts_tokens_equal_(\d+)",
                     r"decode in all six layouts: same tokens, contexts of \1"),
                Line("memory-layouts", r"decode_step_ratio_to_best (\w+) \((8192 .*)\)",
                     r"… step in \1 to the best (\2)"),
            )
        ),
    ),
)  # fmt: skip

CORRECTNESS = Theme(
    "Correctness campaigns",
    "Faults, each with requests under way ('Testing' says what a case is), and soaks.",
    (
        Counts(
            (
                Line("control-faults", "every state", "every state: kill, restart, stop"),
                Line("control-faults", "field failures", "failures known from the field"),
                Line("control-messages", "messages", "messages lost, repeated, late"),
                Line("control-links", "links", "links cut and slow"),
                Line("control-fuzz", "fuzz", "wrong bytes at every port"),
            ),
            ("cases", "failed", "wrong tokens", "hangs", "leaks", "crashes", "no recovery"),
        ),
        List(
            (
                Line("control-fuzz", r"fuzz: sent", "fuzz: wrong messages sent"),
                Line("control-soak", r"soak (\w+): (hand-overs.*)", r"soak, `\1`: \2"),
                Line("control-soak", r"soak (\w+): (sleeps .*|wrong .*|failed .*|blocks or .*)",
                     r"soak, `\1`: \2"),
                Line("control-soak", r"soak (\w+): (\w+), rss_bytes, grown",
                     r"soak, `\1`: memory of \2 grown"),
            )
        ),
    ),
)  # fmt: skip

THEMES = (TRANSFER, CONNECTORS, GROWTH, HAND_OVER, LOAD, SERVING, SCALE, MEMORY, CORRECTNESS)
