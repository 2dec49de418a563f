"""A report's plots as SVG that takes its colours from the page. Needs matplotlib.

Lines differ by colour and by marker for connectors, by dashes for operations, and staged ones have
hollow markers: no reading depends on colours alone. Their hues are Okabe and Ito's, which people
with any common colour blindness tell apart; the page has them in a light and in a dark version.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.bench.connectors.naming import digits_of
from kvxfer.bench.connectors.panels import CeilingLine, Line, Panel
from kvxfer.bench.connectors.report import Row

NO_MATPLOTLIB = "no plots: matplotlib is missing: pip install 'kvxfer[bench]'"
SIZE_INCHES = (5.2, 4.3)
"""So that the text can be read where a phone is 5.2 inches wide at 72 pixels an inch."""
LOG_ABOVE = 20
"""A linear axis hides what is so many times slower than the quickest."""
MAX_TICKS = 9
NOT_WHOLE = "not measured as a whole"
_INK, _SOFT, _FAINT = "#010101", "#010102", "#010103"
_LINES = ("#020201", "#020202", "#020203", "#020204", "#020205", "#020206")
_VARIABLES = {
    _INK: "var(--ink)",
    _SOFT: "var(--soft)",
    _FAINT: "var(--line)",
    **{colour: f"var(--line-{index})" for index, colour in enumerate(_LINES)},
}
"""What is drawn in the first is, on the page, of the colour that the second names."""
_MARKERS = "osD^vP*"
"""One more than colours, so that the next connectors differ in one of the two."""
_SOLID: Any = "-"
_DASHED: Any = (0, (4, 2))
_CEILINGS: Sequence[Any] = ((0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (8, 3)))
_SETTINGS = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a connector's name is text, whatever is in it
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _SOFT,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "grid.color": _FAINT,
}


@dataclass(frozen=True, slots=True)
class Picture:
    """An `<svg>` element for a page, without scripts, and the text for who does not see it."""

    svg: str
    text: str


def why_no_plots() -> str:
    """'' where they can be drawn."""
    try:
        import matplotlib  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ImportError:
        return NO_MATPLOTLIB
    return ""


def draw_panel(panel: Panel, connectors: Sequence[str], number: int) -> tuple[Picture, Picture]:
    """GB/s and latency over the panel's axis. `connectors`: all of the page, for the colours;
    `number` is the panel's own on it, for ids that are nobody else's."""
    text = _described(panel)
    rates = f"GB/s over {panel.axis_name}, {panel.title}. {text}"
    latencies = (
        f"Latency in µs over {panel.axis_name}, {panel.title}: lines are p50, bars reach p99."
    )
    return (
        Picture(_svg(panel, connectors, f"rate-{number}", _draw_rates), rates),
        Picture(_svg(panel, connectors, f"latency-{number}", _draw_latencies), latencies),
    )


def _described(panel: Panel) -> str:
    best = [max(line.rows, key=lambda row: row.gb_per_s.median) for line in panel.lines]
    lines = [
        f"{line.name}: at most {digits_of(row.gb_per_s.median, 3)}"
        for line, row in zip(panel.lines, best, strict=True)
    ]
    ceilings = [
        f"ceiling {one.name}: at most {digits_of(max(rate.median for _, rate in one.points), 3)}"
        for one in panel.ceilings
    ]
    return "; ".join([*lines, *ceilings]) + "."


def _svg(panel: Panel, connectors: Sequence[str], name: str, draw: Any) -> str:
    import matplotlib
    from matplotlib.figure import (  # type: ignore[import-not-found, unused-ignore]
        Figure,
    )

    out = io.StringIO()
    # The same report gives the same bytes, whoever draws it.
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}), warnings.catch_warnings():
        # The reader's fonts are used, not those that the sizes of texts were measured with.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        draw(axes, panel, connectors)
        _finish(axes, panel)
        _legend(figure, axes, panel)
        figure.savefig(out, format="svg", metadata={"Date": None})
    return _for_page(out.getvalue(), name)


def _draw_rates(axes: Any, panel: Panel, connectors: Sequence[str]) -> None:
    for line in panel.lines:
        rates = [row.gb_per_s for row in line.rows]
        medians = [rate.median for rate in rates]
        below = [min(rate.iqr / 2, 0.999 * rate.median) for rate in rates]  # a log axis has no 0
        above = [rate.iqr / 2 for rate in rates]
        _line(axes, panel, line, connectors, medians, (below, above))
    for one, dashes in zip(panel.ceilings, _dashes(len(panel.ceilings)), strict=True):
        _ceiling(axes, one, dashes)
    found = [row.gb_per_s.median for line in panel.lines for row in line.rows]
    found += [rate.median for one in panel.ceilings for _, rate in one.points]
    low, high = min(found), max(found)
    if low > 0 and high > LOG_ABOVE * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 2, high * 1.6)  # bars may leave it: they can reach 0
    else:
        axes.set_ylim(0, high * 1.1 or 1)
    axes.set_title("GB/s, bars: distance between quartiles", loc="left")


def _ceiling(axes: Any, line: CeilingLine, dashes: Any) -> None:
    x = [x for x, _ in line.points]
    rates = [rate for _, rate in line.points]
    label, look = f"ceiling: {line.name}", {"color": _INK, "linestyle": dashes, "linewidth": 1.3}
    if len(x) == 1:
        axes.axhline(rates[0].median, label=label, **look)
        return
    axes.plot(x, [rate.median for rate in rates], label=label, **look)
    axes.fill_between(
        x,
        [rate.median - rate.iqr / 2 for rate in rates],
        [rate.median + rate.iqr / 2 for rate in rates],
        color=_SOFT,
        alpha=0.18,
        linewidth=0,
    )


def _draw_latencies(axes: Any, panel: Panel, connectors: Sequence[str]) -> None:
    for line in panel.lines:
        latencies = [row.latency_us for row in line.rows]
        above = [max(0.0, one.p99 - one.p50) for one in latencies]
        medians = [one.p50 for one in latencies]
        _line(axes, panel, line, connectors, medians, ([0.0] * len(above), above))
    if all(row.latency_us.p50 > 0 for line in panel.lines for row in line.rows):
        axes.set_yscale("log")
    axes.set_title("latency, µs: p50, bars up to p99", loc="left")


def _line(
    axes: Any,
    panel: Panel,
    line: Line,
    connectors: Sequence[str],
    y: Sequence[float],
    error: tuple[Sequence[float], Sequence[float]],
) -> None:
    index = connectors.index(line.kind.connector)
    colour = _LINES[index % len(_LINES)]
    x = [panel.x_of(row) for row in line.rows]
    axes.errorbar(
        x,
        y,
        yerr=error,
        label=line.name,
        color=colour,
        linestyle=_SOLID if line.kind.operation == "WRITE" else _DASHED,
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=4.5,
        markerfacecolor="none" if line.kind.mode != "direct" else colour,
        linewidth=1.5,
        elinewidth=1,
        capsize=2.5,
    )
    partial = [place for place, row in enumerate(line.rows) if row.problem]
    if partial:
        label = None if NOT_WHOLE in axes.get_legend_handles_labels()[1] else NOT_WHOLE
        axes.plot(
            [x[place] for place in partial],
            [y[place] for place in partial],
            linestyle="none",
            marker="x",
            markersize=11,
            color=_INK,
            label=label,
        )


def _dashes(count: int) -> list[Any]:
    return [_CEILINGS[index % len(_CEILINGS)] for index in range(count)]


def _legend(figure: Any, axes: Any, panel: Panel) -> None:
    """Lines in the order of the report, then what else is drawn."""
    lines = [line.name for line in panel.lines]
    found = list(zip(*axes.get_legend_handles_labels(), strict=True))
    found.sort(key=lambda one: lines.index(one[1]) if one[1] in lines else len(lines))
    figure.legend(
        *zip(*found, strict=True),
        loc="outside lower center",
        ncols=2,
        frameon=False,
        handlelength=3.2,
    )


def _finish(axes: Any, panel: Panel) -> None:
    ticks = panel.ticks
    axes.set_xscale("log", base=2)
    shown = ticks[:: -(-len(ticks) // MAX_TICKS)]
    axes.set_xticks(shown, [panel.tick_name(x).replace(" ", "\n") for x in shown])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda value, _: digits_of(value, 3))
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.set_xlabel(panel.axis_name)
    axes.grid(linewidth=0.7)


def _for_page(text: str, name: str) -> str:
    """From a file of its own to an element among others: no declaration, no metadata, ids with a
    name before them, the page's colours."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    for drawn, variable in _VARIABLES.items():
        text = text.replace(drawn, variable)
    return text.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)


def connectors_of(rows: Sequence[Row]) -> list[str]:
    """In the order of the rows, each once."""
    return list(dict.fromkeys(row.kind.connector for row in rows))
