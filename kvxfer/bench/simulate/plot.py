"""The ways to divide workers between prefill and decode, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvxfer.bench.growth_plot import check_plot as check_plot
from kvxfer.bench.simulate.sweep import Split, best_of

LINES = (
    ("ttft p99", ("ttft", "p99")),
    ("ttft p50", ("ttft", "p50")),
    ("tpot p50", ("tpot", "p50")),
)


def draw(splits: Sequence[Split], title: str, path: Path) -> None:
    """Times above, how busy what binds is below. The same figures give the same bytes."""
    import matplotlib  # type: ignore[import-not-found, unused-ignore]
    from matplotlib.figure import (  # type: ignore[import-not-found, unused-ignore]
        Figure as Picture,
    )

    matplotlib.rcParams["svg.hashsalt"] = "kvxfer"
    picture = Picture(figsize=(8, 7), layout="constrained")
    times, uses = picture.subplots(2, sharex=True)
    at = [one.prefill for one in splits]
    for name, key in LINES:
        times.plot(at, [one.outcome.summary.get(key) for one in splits], "o-", label=name)
    times.set_yscale("log")
    times.set_ylabel("ms")
    for place, use in enumerate(splits[0].outcome.uses):
        shares = [one.outcome.uses[place].mean for one in splits]
        if max(shares) > 0.02:
            uses.plot(at, shares, "o-", label=use.name)
    uses.set_ylabel("busy, share")
    uses.set_xlabel(f"prefill workers, of {splits[0].prefill + splits[0].decode}")
    for axes in (times, uses):
        axes.axvline(best_of(splits).prefill, color="grey", linestyle=":", label="best")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    picture.suptitle(title, fontsize="medium")
    picture.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
