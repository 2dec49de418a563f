"""The growth of what a process holds besides its KV, over time, as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from kvxfer.bench.memory_watch import MIB, SampleLog, read_log
from kvxfer.errors import UsageError

CONSTANT = 0.2
"""The fraction of the transient peak headroom that the sizing keeps free (S10)."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlotOptions:
    """What `kvxfer bench buffer-plot` may be told."""

    samples: Path
    """The JSON lines that `kvxfer bench buffer` wrote."""
    out: Path
    """The picture to write; its suffix, .svg or .png, says which kind."""


def run_buffer_plot(options: BufferPlotOptions) -> int:
    """Raises UsageError for samples that cannot be read, or without matplotlib."""
    try:
        log = read_log(options.samples)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError("samples", str(options.samples), f"cannot be read: {error}") from error
    if problem := plot(log, options.out):
        raise UsageError("out", str(options.out), problem)
    print(f"wrote {options.out}")
    return 0


def plot(log: SampleLog, path: Path) -> str:
    """Write the picture; '' or why there is none."""
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return "matplotlib is missing: pip install 'kvxfer[bench]'"
    from matplotlib.figure import (  # type: ignore[import-not-found, unused-ignore]
        Figure as Picture,
    )

    matplotlib.rcParams["svg.hashsalt"] = "kvxfer"  # the same samples give the same bytes
    base, found = log.baseline, log.fit
    minutes = [sample.at_s / 60 for sample in log.samples]
    picture = Picture(figsize=(8, 4.5), layout="constrained")
    axes = picture.subplots()
    held = [(sample.used - base.used) / MIB for sample in log.samples]
    axes.plot(minutes, held, label="held besides the KV", linewidth=1)
    in_tensors = [(sample.allocated_peak - base.allocated_peak) / MIB for sample in log.samples]
    axes.plot(minutes, in_tensors, label="peak in tensors", linewidth=0.6, alpha=0.6)
    for fraction, name, style in (
        (found.fraction, "fitted", "--"),
        (CONSTANT, "the constant", ":"),
    ):
        label = f"{name}: {100 * fraction:.1f} % of the transient peak"
        axes.axhline(fraction * found.headroom / MIB, label=label, linestyle=style, color="black")
    axes.set_xlabel("minutes of mixed load")
    axes.set_ylabel("MiB more than after warm-up")
    axes.set_title(f"Transient peak of warm-up: {found.headroom / MIB:.0f} MiB")
    axes.grid(alpha=0.3)
    axes.legend()
    metadata = {"Date": None} if path.suffix == ".svg" else None
    picture.savefig(path, metadata=metadata)
    return ""
