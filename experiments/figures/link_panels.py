"""What the links between regions could carry and did carry over the whole run: a panel per direction."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.figures.decision_marks import draw_marks, marks_over_time
from experiments.figures.link_rates import Traffic, busiest, capacity_bps, used_bps, wan_traffic
from experiments.figures.style import GREY, LIGHT_GREY, RunStyle
from planner.backend import RunRecord
from planner.cluster import Link
from planner.metrics import measure, step_ends_s
from traces.trace import FloatArray

_MOST_PANELS = 8
_BINS = 150
_UNITS = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0))


def shown_links(records: Sequence[RunRecord]) -> tuple[Link, ...]:
    """Return the links that get a panel: those between regions that carried most."""
    links = {link.name: link for record in records for link in record.scenario.cluster.links}
    return busiest(links.values(), [wan_traffic(record) for record in records], _MOST_PANELS)


def links_inches(count: int) -> float:
    """Return the height of this many panels."""
    return 0.75 + 1.45 * -(-count // 2)


def draw_links(
    figure: SubFigure, links: Sequence[Link], records: Sequence[RunRecord], styles: Sequence[RunStyle]
) -> None:
    """Draw a panel for each link, two in a row."""
    span_s = max(step_ends_s(record.events)[-1] for record in records)
    width_s = max(span_s / _BINS, max(measure(record).step_s for record in records))
    edges_s = np.linspace(0.0, span_s, max(1, round(span_s / width_s)) + 1)
    traffics = [wan_traffic(record) for record in records]
    columns = min(2, len(links))
    grid = figure.subplots(-(-len(links) // columns), columns, squeeze=False, sharex=True, sharey=True)
    panels: list[Axes] = list(grid.flat)
    for axes in panels[len(links) :]:
        axes.remove()
    unit, scale = _unit(max(float(capacity_bps(link, span_s)[1].max()) for link in links))
    for axes, link in zip(panels, links, strict=False):
        axes.set_xlim(0, span_s)
        _draw_rates(axes, link, [traffic.get(link.name) for traffic in traffics], styles, edges_s, scale)
        pad = 3 + 9 * sum(bool(record.decisions) for record in records)
        axes.set_title(f"link {link.source} → {link.target}", loc="left", pad=pad)
        for row, (record, style) in enumerate(zip(records, styles, strict=True)):
            draw_marks(axes, marks_over_time(record), style, row)
    for axes in panels[: len(links)]:
        axes.set_ylim(bottom=0)
    figure.supylabel(f"rate ({unit})", fontsize=8.5)
    figure.supxlabel("time since the start of the run (s)", fontsize=8.5)
    _draw_legend(figure, styles, records, edges_s[1])


def _draw_rates(
    axes: Axes,
    link: Link,
    traffics: Sequence[Traffic | None],
    styles: Sequence[RunStyle],
    edges_s: FloatArray,
    scale: float,
) -> None:
    change_s, capacity = capacity_bps(link, float(edges_s[-1]))
    axes.stairs(capacity / scale, change_s, fill=True, color=LIGHT_GREY, alpha=0.6)
    axes.stairs(capacity / scale, change_s, baseline=None, color=GREY, linewidth=1)
    for traffic, style in zip(traffics, styles, strict=True):
        if traffic is not None:
            used = used_bps(traffic, edges_s) / scale
            axes.stairs(used, edges_s, baseline=None, color=style.colour, linestyle=style.line, linewidth=1.3)


def _draw_legend(figure: SubFigure, styles: Sequence[RunStyle], records: Sequence[RunRecord], bin_s: float) -> None:
    handles: list[Patch | Line2D] = [Patch(facecolor=LIGHT_GREY, edgecolor=GREY, label="capacity")]
    handles += [
        Line2D([], [], color=style.colour, linestyle=style.line, label=f"used, {style.name} (mean over {bin_s:.2g} s)")
        for style in styles
    ]
    if any(record.decisions for record in records):
        handles.append(
            Line2D([], [], color=GREY, linestyle=(0, (4, 2)), linewidth=0.8, label="decision, numbered below")
        )
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))


def _unit(largest_bps: float) -> tuple[str, float]:
    return next(((unit, scale) for unit, scale in _UNITS if largest_bps >= 2 * scale), _UNITS[-1])
