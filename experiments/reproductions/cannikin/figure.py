"""How long each system trains, and with which batches."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Protocol

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from experiments.report.data.style import BLUE, DOTS_PER_INCH, GREY, ORANGE, SETTINGS, SKY, WIDTH_INCHES
from traces.common.atomic import write_bytes_atomically

# Panels of batches side by side.
_COLUMNS = 3

_COLOURS = {"ddp": GREY, "lb-bsp": SKY, "adaptdl": ORANGE, "cannikin": BLUE}


class TrainedSystem(Protocol):
    """What is drawn of how a system trained."""

    @property
    def time_s(self) -> float:
        """Seconds per sample of progress."""

    @property
    def batches(self) -> Sequence[int]:
        """Samples of a step in each part of the run."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One setting.

    Attributes:
        name: Title that people read.
        trained: System to how it trained; the first one is what the others are held against.
    """

    name: str
    trained: Mapping[str, TrainedSystem]


def draw_training(panels: Sequence[Panel], path: Path) -> None:
    """Draw the times of all systems and the batches of the two that change them into a PNG file.

    Args:
        panels: One for each setting.
        path: Where the picture goes; one that is there is replaced.

    Raises:
        InputError: The file cannot be written.
    """
    with rc_context(SETTINGS):
        rows = ceil(len(panels) / _COLUMNS)
        figure = Figure(figsize=(WIDTH_INCHES, 3.0 + 2.4 * rows), dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(1 + rows, _COLUMNS)
        _draw_times(figure.add_subplot(grid[0, :]), panels)
        for number, panel in enumerate(panels):
            row, column = divmod(number, _COLUMNS)
            _draw_batches(figure.add_subplot(grid[1 + row, column]), panel)
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
    write_bytes_atomically(path, picture.getvalue())


def _draw_times(axes: Axes, panels: Sequence[Panel]) -> None:
    systems = list(panels[0].trained)
    width = 0.8 / len(systems)
    for number, system in enumerate(systems):
        ratios = [panel.trained[system].time_s / panel.trained[systems[0]].time_s for panel in panels]
        places = [place + (number - (len(systems) - 1) / 2) * width for place in range(len(panels))]
        bars = axes.bar(places, ratios, width, color=_COLOURS[system], label=system)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_xticks(range(len(panels)), [panel.name.replace(" on ", "\n") for panel in panels])
    axes.set_ylabel(f"time to the target, {systems[0]} = 1")
    axes.legend(ncols=len(systems), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_batches(axes: Axes, panel: Panel) -> None:
    for system, line in (("adaptdl", "--"), ("cannikin", "-")):
        batches = panel.trained[system].batches
        progress = [100 * part / len(batches) for part in range(len(batches))]
        axes.step(progress, batches, line, where="post", color=_COLOURS[system])
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_title(panel.name)
    axes.set_xlabel("progress (%)")
    axes.set_ylabel("samples per step")
