"""Draws a run's pipeline: an overview of how busy its devices were, and a Gantt chart of the chosen part."""

import json
from typing import Any

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    CustomJSHover,
    CustomJSTickFormatter,
    FixedTicker,
    GlyphRenderer,
    Grid,
    HoverTool,
    LinearAxis,
    NoOverlap,
    Range1d,
    RangeTool,
)
from bokeh.plotting import figure
from numpy.typing import NDArray

from experiments.report.data.bars import BAR_KINDS, COMPUTES, MOVE, SEND, WAIT, WAN_SEND, BarKind, Bars, busy_share
from experiments.report.data.labels import GREY
from experiments.report.data.run_view import RunView
from experiments.report.html.document import BUBBLE, WINDOW, centred_text, hover, panel


def packed(bars: Bars) -> dict[str, NDArray[Any]]:
    """Return the columns of bars by name, shape (bars,), in small types; durations replace the ends."""
    return {
        "start_s": bars.start_s,
        "duration_s": (bars.end_s - bars.start_s).astype(np.float32),
        "kind": bars.kind,
        "row": _smallest(bars.row),
        "step": _smallest(bars.step),
        "stage": _smallest(bars.stage),
        "microbatch": _smallest(bars.microbatch),
        "peer": _smallest(bars.peer),
        "action": bars.action,
        "size": _smallest(bars.size),
    }


def _smallest(column: NDArray[Any]) -> NDArray[Any]:
    """Convert a column of integers to the smallest integer type that holds its values."""
    least, most = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    return column.astype(np.result_type(np.min_scalar_type(least), np.min_scalar_type(most)))


# Number of intervals in the overview, each about a pixel wide.
_PIECES = 1000
_MOST_ROWS_PIXELS = 1100

# Colours of the overview: from nearly white for idle devices to the colour of a forward for fully busy ones.
_BUSY_PALETTE = tuple(
    "#" + "".join(f"{round(255 + (end - 255) * share):02X}" for end in (0x00, 0x72, 0xB2))
    for share in np.linspace(0.04, 1, 32)
)


def pipeline_overview(run: RunView, chosen: Range1d, left_pixels: int) -> figure:
    """Return an overview of the whole run, a row per device, darker where the device computes, and mark ``chosen``."""
    rows = len(run.devices)
    made = panel(
        f"overview-{run.index}",
        26 + max(44, min(110, 5 * rows)),
        left_pixels,
        x_range=Range1d(0, run.end_s, bounds=(0, run.end_s)),
        y_range=Range1d(rows - 0.5, -0.5),
    )
    made.toolbar.tools = []
    edges_s = np.linspace(0.0, run.end_s, _PIECES + 1)
    share = np.round(255 * busy_share(run.bars, rows, edges_s)).astype(np.uint8)
    made.image(image=[share], x=0, y=-0.5, dw=run.end_s, dh=rows, palette=_BUSY_PALETTE, level="underlay")
    made.yaxis.ticker = FixedTicker(ticks=[])
    made.yaxis.axis_label = "whole run"
    made.yaxis.axis_label_orientation = "horizontal"
    made.ygrid.grid_line_color = None
    made.xaxis.ticker.desired_num_ticks = 10
    window = RangeTool(x_range=chosen, start_gesture="pan")
    window.overlay.update(
        fill_color=WINDOW, fill_alpha=0.12, line_color=WINDOW, line_alpha=0.9, line_width=1.5, line_dash="solid"
    )
    made.add_tools(window)
    return made


def pipeline_gantt(run: RunView, chosen: Range1d, left_pixels: int) -> figure:
    """Return the Gantt chart: a row per device, with bars for compute and, below them, bars for sends."""
    rows = len(run.devices)
    row_pixels = min(42.0, max(15.0, 420 / rows), _MOST_ROWS_PIXELS / rows)
    made = panel(
        f"gantt-{run.index}",
        round(rows * row_pixels) + 72,
        left_pixels,
        x_range=chosen,
        y_range=Range1d(rows - 0.5, -0.5),
    )
    _draw_rows(made, run, row_pixels)
    _draw_steps(made, run)
    # This source holds all bars; runs.js draws those in the window.
    made.tags = [ColumnDataSource(packed(run.bars), name=f"bars-{run.index}")]
    names = ("bar", "y", "height", "colour", "left_s", "right_s", "row", "step")
    shown = ColumnDataSource({name: [] for name in names}, name=f"drawn-{run.index}")
    drawn = made.hbar(
        y="y", left="left_s", right="right_s", height="height", fill_color="colour", line_color=None, source=shown
    )
    made.add_tools(_hover(drawn, run))
    numbers = ColumnDataSource({"x": [], "y": [], "text": [], "colour": []}, name=f"numbers-{run.index}")
    centred_text(made, numbers, "colour", 10)
    made.below[0].axis_label = "time since the start of the run (s)"
    return made


def _draw_rows(made: figure, run: RunView, row_pixels: float) -> None:
    """Write the names of the devices, and draw the background of the rows, which shows where a device is idle."""
    rows = len(run.devices)
    places = list(range(rows))
    made.yaxis.ticker = FixedTicker(ticks=places)
    made.yaxis.major_label_overrides = dict(zip(places, run.devices.values(), strict=True))
    made.yaxis.major_label_policy = NoOverlap(min_distance=0)
    made.yaxis.major_label_text_font_size = f"{min(12.0, 0.66 * row_pixels):.1f}px"
    made.yaxis.major_tick_line_color = None
    made.yaxis.axis_line_color = None
    made.ygrid.grid_line_color = None
    made.hbar(y=places, left=0, right=run.end_s, height=0.86, fill_color=BUBBLE, line_color=None, level="underlay")


def _draw_steps(made: figure, run: RunView) -> None:
    """Draw a line where each step begins, with its name above."""
    starts_s = list(run.starts_s)
    ticker = FixedTicker(ticks=starts_s)
    names = {start_s: step_name(run, run.first_step + index) for index, start_s in enumerate(starts_s)}
    axis = LinearAxis(
        ticker=ticker,
        formatter=CustomJSTickFormatter(
            args={"starts": starts_s, "names": list(names.values())}, code="return names[starts.indexOf(tick)]"
        ),
        major_label_policy=NoOverlap(min_distance=12),
        axis_line_color=None,
        major_tick_line_color=GREY,
        major_label_text_color=GREY,
    )
    made.add_layout(axis, "above")
    made.add_layout(Grid(dimension=0, ticker=ticker, grid_line_color="#7B8794", grid_line_alpha=0.6, level="glyph"))


def step_name(run: RunView, step: int) -> str:
    """Return a step's name, with the numbers of the decisions whose plan the step is the first to run."""
    decisions = run.record.decisions
    numbers = [str(number) for number, each in enumerate(decisions, start=1) if each.first_step == step]
    return f"step {step}" + (f" ◆ decision {', '.join(numbers)}" if numbers else "")


def _hover(drawn: GlyphRenderer, run: RunView) -> HoverTool:
    """Return a tooltip with the exact values of a bar."""
    words = {
        "bar": f"return ropebridge.describe_bar({run.index}, value)",
        "row": "return devices[value]",
        "left_s": f"return ropebridge.describe_time({run.index}, drawn.data.bar[special_vars.index])",
        "step": "return value >= 0 ? String(value) : 'none'",
    }
    known = {"devices": list(run.devices.values()), "drawn": drawn.data_source}
    return hover(
        drawn,
        {"what": "@bar{custom}", "device": "@row{custom}", "time": "@left_s{custom}", "step": "@step{custom}"},
        formatters={f"@{name}": CustomJSHover(args=known, code=code) for name, code in words.items()},
        attachment="vertical",
        point_policy="follow_mouse",
        limit=3,
    )


def known_json(runs: tuple[RunView, ...]) -> str:
    """Return the data on the runs that the page's JavaScript reads."""
    known = [
        {
            "starts_s": run.starts_s,
            "end_s": run.end_s,
            "first_step": run.first_step,
            "rows": len(run.devices),
            "peers": run.bars.peers,
            "actions": run.bars.actions,
            "sizes_bytes": run.bars.sizes_bytes,
        }
        for run in runs
    ]
    return json.dumps({"runs": known, "kinds": [_known_kind(*each) for each in enumerate(BAR_KINDS)]})


def _known_kind(number: int, kind: BarKind) -> dict[str, object]:
    # Bokeh takes colours as integers, whose four bytes are red, green, blue and opacity.
    return {
        "label": kind.label,
        "colour": (int(kind.colour[1:], 16) << 8) + 255,
        "text_colour": kind.text_colour,
        "offset": kind.offset,
        "height": kind.height,
        "computes": number in COMPUTES,
        "waits": number == WAIT,
        "sends": number in (SEND, WAN_SEND, MOVE),
    }
