"""Colours, line styles, names and formatted numbers for figures and pages of runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.plan.plan import Plan
from planner.runs.record import RunRecord

# Okabe and Ito's palette, which people with any common colour blindness can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK = COLOURS
GREY = "#808080"
LIGHT_GREY = "#D9D9D9"


@dataclass(frozen=True, slots=True)
class WorkStyle:
    """Style of one kind of work: its name in the legend, its colour, and the colour of text on it."""

    label: str
    colour: str
    text_colour: str


# Keyed by the action of an event.
WORK_STYLES = {
    "F": WorkStyle("forward", BLUE, "white"),
    "B": WorkStyle("backward", ORANGE, "black"),
    "I": WorkStyle("input gradient", SKY, "black"),
    "W": WorkStyle("weight gradient", GREEN, "black"),
    "S": WorkStyle("gradient sync", PURPLE, "black"),
}

# Colours of runs: first three that no bar of a Gantt chart has, then colours of bars for further runs.
_RUN_COLOURS = (BLACK, VERMILLION, GREY, BLUE, GREEN, PURPLE, ORANGE, SKY)


Line = Literal["-", "--", ":", "-."]
_LINES: tuple[Line, ...] = ("-", "--", ":", "-.")


def run_line(index: int) -> tuple[str, Line]:
    """Return the colour and the line style of a run in panels that hold all runs."""
    return _RUN_COLOURS[index % len(_RUN_COLOURS)], _LINES[index % len(_LINES)]


def run_names(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """Return a unique name for each run: its backend, with the strategy or a number if backends are not unique."""
    choices = (
        tuple(record.backend for record in records),
        tuple(f"{record.backend} {record.plan.strategy}" for record in records),
    )
    numbered = tuple(f"{record.backend} {number}" for number, record in enumerate(records, start=1))
    return next((names for names in choices if len(set(names)) == len(records)), numbered)


def plan_at(record: RunRecord, step: int) -> Plan:
    """Return the plan that a step ran with."""
    decided = (decision.plan for decision in reversed(record.decisions) if decision.first_step <= step)
    return next(decided, record.plan)


def batch_text(record: RunRecord) -> str:
    """Return the samples of a step as text, or the least and the most if the plans of the run differ in them."""
    batches = {record.plan.global_batch, *(decision.plan.global_batch for decision in record.decisions)}
    least, most = min(batches), max(batches)
    return f"{least} samples per step" if least == most else f"{least} to {most} samples per step"


def device_names(record: RunRecord, first_step: int, end_step: int) -> Mapping[str, str]:
    """Return the devices that work in the steps from ``first_step`` to ``end_step - 1``, in plan order.

    Returns:
        Maps each device to its label ``device (stage k, region)`` by the first plan that has the device; the label also
        names the pipeline if there are several.
    """
    names: dict[str, str] = {}
    for plan in dict.fromkeys(plan_at(record, step) for step in range(first_step, end_step)):
        for pipeline_index, pipeline in enumerate(plan.pipelines):
            prefix = f"pipeline {pipeline_index}, " if len(plan.pipelines) > 1 else ""
            for stage_index, stage in enumerate(pipeline.stages):
                for replica in stage.replicas:
                    region = record.scenario.cluster.by_name[replica.device].region
                    names.setdefault(replica.device, f"{replica.device} ({prefix}stage {stage_index}, {region})")
    return names


_RATES = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0))
_SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def rate_text(rate_bps: float) -> str:
    """Return a rate such as ``12.5 Mbit/s``."""
    return _scaled(rate_bps, _RATES)


def size_text(size_bytes: float) -> str:
    """Return a size such as ``83.9 MB``."""
    return _scaled(size_bytes, _SIZES)


def time_text(time_s: float) -> str:
    """Return a time such as ``320 ms``."""
    return _scaled(time_s, _TIMES)


def memory_text(memory_bytes: float) -> str:
    """Return an amount of memory such as ``0.07 GiB``."""
    return f"{memory_bytes / 2**30:.3g} GiB" if memory_bytes >= 2**30 else f"{memory_bytes / 2**20:.3g} MiB"


def cost_text(cost_usd: float) -> str:
    """Return a price such as ``6.90 USD``."""
    return f"{cost_usd:,.0f} USD" if cost_usd >= 100 else f"{cost_usd:.3g} USD"


def rate_unit(largest_bps: float) -> tuple[str, float]:
    """Return the unit for an axis up to this rate, and the number of bits per second in the unit."""
    return next(((unit, scale) for unit, scale in _RATES if largest_bps >= 2 * scale), _RATES[-1])


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    unit, scale = next((each for each in units if abs(value) >= each[1]), units[-1])
    return f"{value / scale:.3g} {unit}" if abs(value) < 1000 * scale else f"{value / scale:.0f} {unit}"
