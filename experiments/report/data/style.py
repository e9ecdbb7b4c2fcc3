"""How the pictures of runs look."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

# Okabe and Ito's palette, which people with any common colour blindness can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK = COLOURS
GREY = "#808080"
LIGHT_GREY = "#D9D9D9"

# A page of 1000 pixels shows these sizes at 100 pixels an inch; the file has more for sharp screens.
WIDTH_INCHES = 10.0
DOTS_PER_INCH = 150

# Names come from users: a dollar sign in one is no formula. Releases of matplotlib differ in how they type the keys.
SETTINGS: dict[Any, Any] = {
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


@dataclass(frozen=True, slots=True)
class WorkStyle:
    """How one kind of work is drawn: its name in the legend, its colour, and that of text on it."""

    label: str
    colour: str
    text_colour: str


# By the action of an event.
WORK_STYLES = {
    "F": WorkStyle("forward", BLUE, "white"),
    "B": WorkStyle("backward", ORANGE, "black"),
    "I": WorkStyle("input gradient", SKY, "black"),
    "W": WorkStyle("weight gradient", GREEN, "black"),
    "S": WorkStyle("gradient sync", PURPLE, "black"),
}

# Colours that no bar has, then some of theirs: more than three runs in one picture are rare.
_RUN_COLOURS = (BLACK, VERMILLION, GREY, BLUE, GREEN, PURPLE, ORANGE, SKY)


Line = Literal["-", "--", ":", "-."]
_LINES: tuple[Line, ...] = ("-", "--", ":", "-.")


def legend_columns(labels: Iterable[str]) -> int:
    """Return how many of a legend's entries fit side by side."""
    lengths = [len(label) for label in labels]
    return max(1, min(len(lengths), int(WIDTH_INCHES / (0.072 * max(lengths) + 0.6))))


def run_line(index: int) -> tuple[str, Line]:
    """Return the colour and the line style of a run in panels that hold all runs."""
    return _RUN_COLOURS[index % len(_RUN_COLOURS)], _LINES[index % len(_LINES)]
