"""The steps of growths, shrinks, sleeps and wake-ups as stacked bars in a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvxfer.bench.growth_figures import PARTS, Found, median_steps
from kvxfer.errors import UsageError


def check_plot(path: Path) -> None:
    """Before anything is measured. Raises UsageError."""
    if path.suffix not in (".svg", ".png"):
        raise UsageError("plot", str(path), "must end in .svg or .png")
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError:
        reason = "matplotlib is missing: pip install 'kvxfer[bench]'"
        raise UsageError("plot", str(path), reason) from None


def draw(every: Sequence[Found], machine: str, path: Path) -> None:
    """Medians, a bar for each lane and size. Needs matplotlib; the same figures give the same
    bytes."""
    import matplotlib  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import (  # type: ignore[import-not-found, unused-ignore]
        Figure as Picture,
    )

    matplotlib.rcParams["svg.hashsalt"] = "kvxfer"
    height = 2.0 + 0.2 * len(every)
    picture = Picture(figsize=(10, height * len(PARTS)), layout="constrained")
    for axes, (what, names, where) in zip(picture.subplots(len(PARTS)), PARTS, strict=True):
        rows = [(found.name, getattr(found, where)) for found in every if getattr(found, where)]
        _stack(axes, [(name, median_steps(steps, names)) for name, steps in rows], names)
        axes.set_title(what, fontsize="medium")
    picture.suptitle(machine)
    picture.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _stack(axes: Any, rows: Sequence[tuple[str, dict[str, float]]], names: Sequence[str]) -> None:
    labels = [name for name, _ in rows]
    left = [0.0] * len(rows)
    for step in names:
        widths = [steps[step] for _, steps in rows]
        axes.barh(labels, widths, left=left, label=step, height=0.7)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.grid(alpha=0.3, axis="x")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
