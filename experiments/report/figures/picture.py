"""An empty figure in the style of all pictures, and the file that it becomes."""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.report.data.labels import GREY
from traces.common.atomic import write_bytes_atomically

# A page of 1000 pixels shows these sizes at 100 pixels an inch; the file has more for sharp screens.
WIDTH_INCHES = 10.0
DOTS_PER_INCH = 150

# Names come from users: a dollar sign in one is no formula. Releases of matplotlib differ in how they type the keys.
_SETTINGS: dict[Any, Any] = {
    "text.parse_math": False,
    "svg.hashsalt": "ropebridge",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
}


@contextmanager
def picture(path: Path, height_inches: float) -> Iterator[Figure]:
    """Give an empty figure, ``height_inches`` tall; what was drawn becomes a PNG or an SVG file, as the suffix says.

    Raises:
        InputError: The file cannot be written.
    """
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        data = io.BytesIO()
        # Without the date equal runs give equal files.
        figure.savefig(data, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)
    write_bytes_atomically(path, data.getvalue())


def legend_columns(labels: Iterable[str]) -> int:
    """Return how many of a legend's entries fit side by side."""
    lengths = [len(label) for label in labels]
    return max(1, min(len(lengths), int(WIDTH_INCHES / (0.072 * max(lengths) + 0.6))))
