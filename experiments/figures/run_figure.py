"""One picture of one or several runs of a scenario: pipeline, links, step times."""

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch

from experiments.figures.gantt import GanttRows, draw_gantt, gantt_rows, number_bars
from experiments.figures.link_panels import draw_links, shown_links
from experiments.figures.naming import run_names
from experiments.figures.step_panel import draw_step_times
from experiments.figures.style import DOTS_PER_INCH, GREY, SETTINGS, WIDTH_INCHES, WORK_STYLES, RunStyle, run_styles
from experiments.figures.window import check_steps, choose_steps
from planner.backend import RunRecord
from planner.metrics import measure
from traces.atomic import write_bytes_atomically


def draw_runs(records: Sequence[RunRecord], path: Path, *, steps: tuple[int, int] | None = None) -> None:
    """Draw runs of one scenario into a PNG file, 1500 pixels wide.

    From the top: the pipeline of each run over the same steps and the same length of time, what the links between
    regions could carry and did carry, and the time of every step.

    Args:
        records: One or several, for example a simulation and the real run.
        path: Where the picture goes; one that is there is replaced.
        steps: The first step of the pipelines and the one after the last; None to choose a few.

    Raises:
        InputError: A run does not have these steps, or the file cannot be written.
    """
    assert records, "there must be a run to draw"
    if steps is None:
        steps = choose_steps(records)
    else:
        check_steps(records, steps)
    with rc_context(SETTINGS):
        figure = _draw(records, steps)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    write_bytes_atomically(path, picture.getvalue())


def _draw(records: Sequence[RunRecord], steps: tuple[int, int]) -> Figure:
    styles = run_styles(run_names(records))
    rows = [gantt_rows(record, steps) for record in records]
    links = shown_links(records)
    row_inches = min(0.34, max(0.13, 3.0 / max(len(each.devices) for each in rows)))
    heights = [
        sum(len(each.devices) * row_inches + 0.45 for each in rows) + 0.65,
        *([links_inches(len(links), records)] if links else []),
        steps_inches(records),
    ]
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 0.5), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    _draw_title(figure, records, styles)
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    panels = _draw_pipelines(parts[0], records, rows, styles, row_inches)
    if links:
        draw_links(parts[1], links, records, styles)
    draw_step_times(parts[-1], records, styles)
    figure.draw_without_rendering()
    for axes, each in zip(panels, rows, strict=True):
        number_bars(axes, each)
    return figure


def _draw_title(figure: Figure, records: Sequence[RunRecord], styles: Sequence[RunStyle]) -> None:
    plan = records[0].plan
    sizes = {size for pipeline in plan.pipelines for size in pipeline.microbatches}
    counts = ", ".join(f"{len(record.decisions)} {style.name}" for record, style in zip(records, styles, strict=True))
    parts = (
        f"strategy {plan.strategy}",
        f"schedule {plan.schedule}",
        f"microbatches of {' / '.join(map(str, sorted(sizes)))} samples at first",
        f"policy decisions: {counts}",
    )
    figure.suptitle(f"{records[0].scenario.name}\n", x=0.01, horizontalalignment="left", fontsize=13, fontweight="bold")
    ...
