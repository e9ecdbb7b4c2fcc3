"""Opens an empty figure in the common style, and writes it as a file."""

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments.report.data.labels import GREY
from traces.common.atomic import write_bytes_atomically

# Font sizes are chosen for 100 pixels an inch; files have a higher resolution for sharp screens.
WIDTH_INCHES = 10.0
DOTS_PER_INCH = 150

# Users' names may contain dollar signs, which must not start a formula. The keys' type differs between matplotlibs.
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
    """Open an empty figure, ``height_inches`` tall; on exit it is written as PNG or SVG, by the path's suffix.

    Raises:
        InputError: The file cannot be written.
    """
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DOTS_PER_INCH, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        data = io.BytesIO()
        # The date is left out, so that equal runs give equal files.
        with catch_warnings():
            # Names may have letters that no font of the machine has; they are drawn as boxes.
            filterwarnings("ignore", "Glyph .* missing from")
            figure.savefig(data, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)
    write_bytes_atomically(path, data.getvalue())


def legend_columns(labels: Iterable[str]) -> int:
    """Return how many entries of a legend fit side by side."""
    lengths = [len(label) for label in labels]
    return max(1, min(len(lengths), int(WIDTH_INCHES / (0.072 * max(lengths) + 0.6))))
