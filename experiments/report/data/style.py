"""How the pictures of runs look."""

from dataclasses import dataclass
from typing import Literal

# Okabe and Ito's palette, which people with any common colour blindness can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK = COLOURS
GREY = "#808080"
LIGHT_GREY = "#D9D9D9"


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


def run_line(index: int) -> tuple[str, Line]:
    """Return the colour and the line style of a run in panels that hold all runs."""
    return _RUN_COLOURS[index % len(_RUN_COLOURS)], _LINES[index % len(_LINES)]
