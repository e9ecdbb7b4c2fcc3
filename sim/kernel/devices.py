"""Speeds and absences of devices over time: stragglers, slow-downs, hangs and absences as tables for compiled code."""

from collections.abc import Sequence

import numpy as np

from planner.cost.device_speed import device_speed
from planner.scenario.faults import Absence, Hang
from planner.scenario.scenario import Scenario
from sim.kernel.advance import Devices
from sim.kernel.piecewise import RateTable, join_tables


def make_devices(groups: Sequence[Sequence[str]], scenario: Scenario) -> Devices:
    """Return clocks, speeds and absences of all actors at the start of a run."""
    tables: list[RateTable] = []
    numbers, absences = [], []
    for group in groups:
        speed = _speed(group, scenario)
        is_full = np.array_equal(speed.rates, [1.0])
        numbers.append(-1 if is_full else len(tables))
        if not is_full:
            tables.append(speed)
        absences.append(_absences(group, scenario))
    return Devices(
        np.zeros(len(groups)),
        np.array(numbers, np.int64),
        join_tables(tables),
        np.cumsum([0, *map(len, absences)], dtype=np.int64),
        np.array([leaves_s for each in absences for leaves_s, _ in each], np.float64),
        np.array([returns_s for each in absences for _, returns_s in each], np.float64),
        np.zeros(len(groups)),
        np.zeros(len(groups)),
    )


def _speed(group: Sequence[str], scenario: Scenario) -> RateTable:
    """Return the speed of an actor's devices: that of the slowest one, and 0 while one hangs."""
    by_effects = device_speed(scenario.effects.compute, group)
    hangs = [each for each in scenario.faults if isinstance(each, Hang) and each.device in group]
    speed = RateTable(by_effects.times_s, by_effects.speeds)
    return speed.without([(hang.start_s, hang.end_s) for hang in hangs])


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
