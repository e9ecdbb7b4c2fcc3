"""What the bars of a page's Gantt stand for, and how each looks; loads no Bokeh."""

from dataclasses import dataclass

from experiments.report.data.style import PURPLE, VERMILLION, WORK_STYLES


@dataclass(frozen=True, slots=True)
class BarKind:
    """One kind of bar.

    Attributes:
        label: What it is, for people.
        colour: Of the bar.
        text_colour: Of what is written on it.
        offset: Of its middle from the middle of the device's row, downwards, in rows.
        height: In rows.
    """

    label: str
    colour: str
    text_colour: str
    offset: float
    height: float


# A row has two lanes: what the device computes, and below it what it sends.
_WORK = (-0.1, 0.66)
_SENDS = (0.35, 0.16)
_HELD_UP = (-0.1, 0.14)
_WHOLE_ROW = (0.0, 0.86)


def _work(action: str) -> BarKind:
    style = WORK_STYLES[action]
    return BarKind(style.label, style.colour, style.text_colour, *_WORK)


WAIT, ABSENT, SYNC, FORWARD, BACKWARD, INPUT, WEIGHT, OPTIMIZER, SEND, WAN_SEND, MOVE, STALE = range(12)

# By their numbers above: a later one is drawn over an earlier one.
BAR_KINDS = (
    BarKind("waiting for data", "#C6CDD5", "black", *_HELD_UP),
    BarKind("device away or hanging", "#6B7280", "white", *_WHOLE_ROW),
    _work("S"),
    _work("F"),
    _work("B"),
    _work("I"),
    _work("W"),
    BarKind("optimizer", "#F0E442", "black", *_WORK),
    BarKind("sends inside its region", "#A5B1BF", "black", *_SENDS),
    BarKind("sends to another region", "#323F4B", "white", *_SENDS),
    BarKind("sends layers", VERMILLION, "white", *_SENDS),
    BarKind("update of another pipeline waits", PURPLE, "black", *_SENDS),
)
COMPUTES = (FORWARD, BACKWARD, INPUT, WEIGHT, OPTIMIZER)
