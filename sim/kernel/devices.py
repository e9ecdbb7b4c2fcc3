"""Speeds and absences of devices over time: stragglers, slow-downs, hangs and absences as tables for compiled code."""

import math
from collections.abc import Sequence
from functools import reduce

import numpy as np

from planner.scenario.faults import Absence, Hang
from planner.scenario.scenario import Scenario
from sim.kernel.advance import Devices
from sim.kernel.piecewise import RateTable, join_tables

_FULL_SPEED = RateTable((0.0,), (1.0,))


def make_devices(groups: Sequence[Sequence[str]], scenario: Scenario) -> Devices:
    """Return clocks, speeds and absences of all actors at the start of a run."""
    tables: list[RateTable] = []
    numbers, absences = [], []
    for group in groups:
        speed = reduce(_slower, (_speed(device, scenario) for device in group))
        numbers.append(-1 if speed == _FULL_SPEED else len(tables))
        if speed != _FULL_SPEED:
            tables.append(speed)
        absences.append(_absences(group, scenario))
    return Devices(
        np.zeros(len(groups)),
        np.array(numbers, np.int64),
        join_tables(tables),
        np.cumsum([0, *map(len, absences)], dtype=np.int64),
        np.array([leaves_s for each in absences for leaves_s, _ in each], np.float64),
        np.array([returns_s for each in absences for _, returns_s in each], np.float64),
    )


def _speed(device: str, scenario: Scenario) -> RateTable:
    compute = scenario.effects.compute
    speed = _FULL_SPEED
    for slowdown in compute.slowdowns:
        if slowdown.device == device:
            speed = RateTable(slowdown.times_s, slowdown.speed)
    for straggler in compute.stragglers:
        if straggler.device == device:
            speed = speed.clipped(1 / straggler.factor, math.inf)
    for fault in scenario.faults:
        if isinstance(fault, Hang) and fault.device == device:
            speed = speed.without(fault.start_s, fault.end_s)
    return speed


def _slower(one: RateTable, other: RateTable) -> RateTable:
    """Return the lower of two speeds at every time; neither table repeats."""
    if one == other:
        return one
    times_s = sorted({*one.times_s, *other.times_s})
    return RateTable(times_s, [min(one.at(time_s), other.at(time_s)) for time_s in times_s])


def _absences(group: Sequence[str], scenario: Scenario) -> list[tuple[float, float]]:
    """Return the times in which one of an actor's devices is absent, so that it cannot work: disjoint, rising."""
    gone = sorted(
        (fault.start_s, fault.end_s)
        for fault in scenario.faults
        if isinstance(fault, Absence) and fault.device in group
    )
    merged: list[tuple[float, float]] = []
    for start_s, end_s in gone:
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged
