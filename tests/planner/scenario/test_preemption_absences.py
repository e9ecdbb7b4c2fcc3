"""A trace of nodes played on devices."""

import math

from hypothesis import given
from hypothesis import strategies as st

from planner.scenario.faults import Absence, absences_in_order, absences_of_nodes, find_overlap
from traces.preemption.trace import NodeChange, PreemptionTrace, trace_of_counts

# Node b leaves at 10 s; d comes at 12 s, when c is there already, and e at 20 s.
TRACE = PreemptionTrace(
    (
        NodeChange(0.0, "a", True),
        NodeChange(0.0, "b", True),
        NodeChange(5.0, "c", True),
        NodeChange(10.0, "b", False),
        NodeChange(12.0, "d", True),
        NodeChange(15.0, "a", False),
        NodeChange(20.0, "e", True),
    ),
    30.0,
)


def test_nodes_take_the_first_free_device_and_spares_are_not_used() -> None:
    assert absences_in_order(TRACE, ["left", "right"]) == (Absence("right", 10.0, 12.0), Absence("left", 15.0, 20.0))
    assert absences_in_order(TRACE, ["left", "right", "third"]) == (
        Absence("third", 0.0, 5.0),
        Absence("right", 10.0, 12.0),
        Absence("left", 15.0, 20.0),
    )


def test_the_run_may_start_later() -> None:
    assert absences_in_order(TRACE, ["left", "right"], 11.0) == (Absence("right", 0.0, 1.0), Absence("left", 4.0, 9.0))
    assert absences_in_order(TRACE, ["left", "right"], 100.0) == ()


def test_nodes_stand_for_devices() -> None:
    assert absences_of_nodes(TRACE, {"b": "left", "d": "left", "e": "right"}) == (
        Absence("right", 0.0, 20.0),
        Absence("left", 10.0, 12.0),
    )
    assert absences_of_nodes(TRACE, {"b": "left"}) == (Absence("left", 10.0, math.inf),)


def test_a_device_that_nobody_takes_is_never_there() -> None:
    trace = trace_of_counts([(0.0, 1)], 10.0)
    assert absences_in_order(trace, ["left", "right"]) == (Absence("right", 0.0, math.inf),)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(1, 4), st.floats(0, 25))
def test_as_many_devices_are_there_as_nodes_at_most(counts: list[int], devices: int, start_s: float) -> None:
    trace = trace_of_counts([(float(time_s), count) for time_s, count in enumerate(counts)], float(len(counts)))
    absences = absences_in_order(trace, [f"device-{n}" for n in range(devices)], start_s)
    assert find_overlap(absences) is None
    for time_s in range(math.ceil(start_s), len(counts)):
        gone = sum(each.start_s <= time_s - start_s < each.end_s for each in absences)
        # Of counts, the highest numbers leave first, and they come last: no device stays free beside a spare node.
        assert devices - gone == min(devices, counts[time_s])
