"""Values of effects and faults that cannot be are refused where they are made."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.scenario.effects import TCP, ComputeEffects, NetworkEffects, Slowdown, Straggler
from planner.scenario.faults import Absence, Hang, LinkOutage, find_overlap
from traces.common.errors import InputError

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "payload of nothing": (lambda: NetworkEffects(payload_efficiency=0.0), "payload efficiency 0"),
    "payload of more than all": (lambda: NetworkEffects(payload_efficiency=1.1), "payload efficiency 1.1"),
    "no window": (lambda: NetworkEffects(window_bytes=0.0), "a window of 0 bytes, initially 14480,"),
    "no first window": (lambda: NetworkEffects(initial_window_bytes=0.0), "a window of inf bytes, initially 0,"),
    "idle before": (lambda: NetworkEffects(idle_s=-1.0), "counts as idle after -1 s"),
    "no factor": (lambda: Straggler("a", 0.0), "device 'a' takes 0 times as long"),
    "no pieces": (lambda: Slowdown("a", (), ()), "has 0 times and 0 speeds"),
    "more times": (lambda: Slowdown("a", (0.0, 1.0), (1.0,)), "has 2 times and 1 speeds"),
    "late start": (lambda: Slowdown("a", (1.0,), (1.0,)), "the first time is 1 s"),
    "backwards": (lambda: Slowdown("a", (0.0, 2.0, 1.0), (1.0, 1.0, 1.0)), "from 2 s to 1 s in interval 3"),
    "negative speed": (lambda: Slowdown("a", (0.0, 2.0), (-1.0, 1.0)), "speed -1 in interval 1"),
    "still for ever": (lambda: Slowdown("a", (0.0, 2.0), (1.0, 0.0)), "stands still for ever from 2 s on"),
    "negative overhead": (lambda: ComputeEffects(launch_overhead_s=-1e-6), "launch overhead of -1e-06 s"),
    "negative jitter": (lambda: ComputeEffects(jitter=-0.1), "jitter -0.1"),
    "jitter that is no number": (lambda: ComputeEffects(jitter=math.nan), "jitter nan"),
    "a straggler twice": (lambda: ComputeEffects(stragglers=(Straggler("a", 2.0),) * 2), "'a' is named twice"),
    "a fault backwards": (lambda: Absence("a", 5.0, 4.0), "a fault from 5 s to 4 s"),
    "a fault of no time": (lambda: Hang("a", 5.0, 5.0), "a fault from 5 s to 5 s"),
    "a fault before the run": (lambda: Absence("a", -1.0), "a fault from -1 s to inf s"),
    "a fault that never starts": (lambda: Absence("a", math.inf), "a fault from inf s to inf s"),
    "an outage for ever": (lambda: LinkOutage("a->b", 0.0, math.inf), "link 'a->b' is out for ever"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused(case: str) -> None:
    make, problem = WRONG[case]
    with pytest.raises(InputError) as caught:
        make()
    assert problem in caught.value.problem
    assert caught.value.valid


def test_what_can_be() -> None:
    assert NetworkEffects(payload_efficiency=1.0).window_bytes == math.inf
    assert TCP.cold_start
    assert Slowdown("a", (0.0, 1.0, 2.0), (1.0, 0.0, 3.0)).speed[1] == 0


def test_faults_overlap_on_the_same_device_only() -> None:
    assert (
        find_overlap([Absence("a", 0.0, 2.0), Hang("a", 2.0, 3.0), Hang("b", 1.0), LinkOutage("a", 1.0, 2.0)]) is None
    )
    assert find_overlap([Absence("a", 0.0, 2.0), Hang("b", 0.0), Hang("a", 1.0, 3.0)]) == (0, 2)
    assert find_overlap([Hang("b", 5.0), Absence("b", 100.0)]) == (0, 1)


spans = st.tuples(st.integers(0, 30), st.integers(1, 4))
faults = st.builds(lambda name, span: Absence(name, span[0], span[0] + span[1]), st.sampled_from("ab"), spans)


@given(st.lists(faults, max_size=8))
def test_an_overlap_is_found_exactly_where_two_of_all_pairs_overlap(given: list[Absence]) -> None:
    def overlap(one: Absence, other: Absence) -> bool:
        return one.device == other.device and one.start_s < other.end_s and other.start_s < one.end_s

    pairs = [(a, b) for b in range(len(given)) for a in range(b) if overlap(given[a], given[b])]
    found = find_overlap(given)
    assert found in pairs if pairs else found is None


def test_a_long_record_of_absences_is_looked_through_once() -> None:
    compared = 0

    class Counted(float):
        def __lt__(self, other: float) -> bool:
            nonlocal compared
            compared += 1
            return float(self) < float(other)

    count = 2000
    assert find_overlap([Absence("a", Counted(2 * each), Counted(2 * each + 1)) for each in range(count)]) is None
    assert compared < 10 * count
