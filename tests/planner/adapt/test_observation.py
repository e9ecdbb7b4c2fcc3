from hypothesis import given, settings
from hypothesis import strategies as st

from planner.adapt.policy import PathObservation, observe
from planner.events.event import Event, EventKind
from tests.helpers.scenarios.builders import chain_plan, chain_scenario

SCENARIO = chain_scenario([1.0, 1.0], [1.0, 1.0])
PLAN = chain_plan(SCENARIO)


def send(start_s: float, end_s: float, *, microbatch: int = 0, action: str = "F", size_bytes: int = 10) -> Event:
    return Event(EventKind.SEND, "a", "b", 0, 0, microbatch, 3, action, start_s, end_s, size_bytes)


def receive(end_s: float, *, microbatch: int = 0, action: str = "F") -> Event:
    return Event(EventKind.RECEIVE, "b", "a", 0, 1, microbatch, 3, action, 0.0, end_s, 10)


def compute(device: str, start_s: float, end_s: float, step: int = 3) -> Event:
    return Event(EventKind.COMPUTE, device, "", 0, 0, 0, step, "F", start_s, end_s, 0)


def test_busy_time_is_the_union_of_the_sends() -> None:
    # Two that overlap, one inside them, one after a pause, one that touches it.
    events = [send(1.0, 4.0), send(3.0, 6.0), send(2.0, 3.0), send(10.0, 11.0), send(11.0, 13.0)]
    (path,) = observe(events, 3, PLAN).paths
    assert path == PathObservation("a", "b", 50, 8.0, None)
    assert path.rate_bps == 50.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), min_size=1, max_size=10))
def test_busy_time_counts_each_moment_once(intervals: list[tuple[int, int]]) -> None:
    events = [send(float(start), float(start + length)) for start, length in intervals]
    (path,) = observe(events, 3, PLAN).paths
    assert path.busy_s == len({second for start, length in intervals for second in range(start, start + length)})


def test_latency_is_the_least_from_leaving_to_arrival() -> None:
    events = [
        send(0.0, 1.0, microbatch=0),
        receive(1.75, microbatch=0),
        send(1.0, 2.0, microbatch=1),
        receive(2.5, microbatch=1),
        # Nobody waited for this one, and this is another action's.
        send(2.0, 3.0, microbatch=2),
        receive(3.0, microbatch=2, action="B"),
    ]
    (path,) = observe(events, 3, PLAN).paths
    assert path.latency_s == 0.5


def test_each_direction_is_a_path_of_its_own() -> None:
    back = Event(EventKind.SEND, "b", "a", 0, 1, 0, 3, "B", 5.0, 7.0, 30)
    paths = observe([back, send(0.0, 1.0)], 3, PLAN).paths
    assert [(path.source, path.target, path.size_bytes) for path in paths] == [("a", "b", 10), ("b", "a", 30)]


def test_a_step_ends_with_its_last_event() -> None:
    assert observe([compute("a", 0.0, 2.0), compute("b", 1.0, 5.0), compute("a", 5.0, 9.0, step=4)], 3, PLAN).end_s == 5


def test_sends_that_took_no_time_say_nothing() -> None:
    assert observe([send(1.0, 1.0, size_bytes=0)], 3, PLAN).paths == ()


def test_compute_is_summed_by_device_and_other_steps_are_passed_over() -> None:
    events = [compute("b", 0.0, 2.0), compute("a", 0.0, 1.0), compute("a", 4.0, 6.0), compute("a", 0.0, 9.0, step=2)]
    observation = observe(events, 3, PLAN)
    assert observation.compute_s == (("a", 3.0), ("b", 2.0))
    assert (observation.step, observation.plan, observation.paths) == (3, PLAN, ())


def test_the_order_of_events_does_not_matter() -> None:
    events = [send(1.0, 4.0), send(3.0, 6.0, microbatch=1), receive(4.5), compute("a", 0.0, 1.0)]
    assert observe(events, 3, PLAN) == observe(events[::-1], 3, PLAN)
