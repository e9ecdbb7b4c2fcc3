import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.adapt.observation import PROBE_BYTES, WINDOW_STEPS, Observer, PathObservation, probe_turn
from planner.events.event import PROBE_ACTION, Event, EventKind
from tests.helpers.scenarios.builders import chain_plan, chain_scenario

SCENARIO = chain_scenario([1.0, 1.0], [1.0, 1.0])
PLAN = chain_plan(SCENARIO)


def send(start_s: float, end_s: float, *, microbatch: int = 0, size_bytes: int = 10, step: int = 3) -> Event:
    """A message that arrives at ``end_s``."""
    return Event(EventKind.SEND, "a", "b", 0, 0, microbatch, step, "F", start_s, start_s, size_bytes, arrived_s=end_s)


def probe(start_s: float, end_s: float, step: int = 3) -> Event:
    return Event(EventKind.SEND, "a", "b", 0, 0, -1, step, PROBE_ACTION, start_s, start_s, PROBE_BYTES, arrived_s=end_s)


def compute(device: str, start_s: float, end_s: float, step: int = 3) -> Event:
    return Event(EventKind.COMPUTE, device, "", 0, 0, 0, step, "F", start_s, end_s, 0)


def test_busy_time_is_the_union_of_the_sends() -> None:
    # Two that overlap, one inside them, one after a pause, one that touches it.
    events = [send(1.0, 4.0), send(3.0, 6.0), send(2.0, 3.0), send(10.0, 11.0), send(11.0, 13.0)]
    (path,) = Observer().observe(events, 3, PLAN).paths
    assert path == PathObservation("a", "b", 50, ((1.0, 6.0), (10.0, 13.0)), None, queue_s=(2.0 + 1.0) / 5)
    assert path.rate_bps == 50.0


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), min_size=1, max_size=10))
def test_busy_time_counts_each_moment_once(intervals: list[tuple[int, int]]) -> None:
    events = [send(float(start), float(start + length)) for start, length in intervals]
    (path,) = Observer().observe(events, 3, PLAN).paths
    assert path.busy_s == len({second for start, length in intervals for second in range(start, start + length)})


def test_the_least_delay_of_the_last_steps_is_the_propagation_delay() -> None:
    observer = Observer()
    # Probes behind a message, and one that finds an empty queue.
    first, second = [send(0.0, 1.5), probe(0.25, 1.5)], [send(2.0, 3.5, step=4), probe(2.0, 2.5, step=4)]
    assert observer.observe(first, 3, PLAN).paths == (PathObservation("a", "b", 10, ((0.0, 0.25),), 1.25),)
    assert observer.observe(second, 4, PLAN).paths == (PathObservation("a", "b", 10, ((2.0, 3.0),), 0.5),)
    for step in range(5, 4 + WINDOW_STEPS):
        at_s = 2.0 * step
        (path,) = observer.observe(
            [send(at_s, at_s + 1.5, step=step), probe(at_s, at_s + 1, step=step)], step, PLAN
        ).paths
        assert path.latency_s == 0.5
    (path,) = observer.observe([send(90.0, 91.5, step=50), probe(90.0, 91.0, step=50)], 50, PLAN).paths
    assert path == PathObservation("a", "b", 10, ((90.0, 90.5),), 1.0)


@pytest.mark.parametrize("later_s", [0.3, 1.5])
def test_a_latency_that_rises_is_seen_by_the_third_probe_that_finds_an_empty_queue(later_s: float) -> None:
    """Messages of ten bytes a second are under way together, so that only their arrivals tell probes from queues."""
    observer = Observer()

    def step(number: int, latency_s: float) -> PathObservation:
        at_s = 100.0 * number
        message = send(at_s, at_s + 1 + latency_s, step=number)
        behind = [probe(at_s + 0.5, at_s + 1 + latency_s, number), send(at_s + 0.5, at_s + 2 + latency_s, step=number)]
        apart = [probe(at_s + 1.5, at_s + 1.5 + latency_s, number)]
        (path,) = observer.observe([message, *(apart if number % 2 else behind)], number, PLAN).paths
        return path

    assert [step(number, 0.1).latency_s for number in range(1, 7)] == pytest.approx([0.1] * 6)
    seen = [step(number, later_s) for number in range(7, 13)]
    assert [path.latency_s for path in seen[:4]] == pytest.approx([0.1] * 4)
    assert [path.latency_s for path in seen[4:]] == pytest.approx([later_s] * 2)
    assert seen[4].rate_bps == pytest.approx(80.0)


@given(
    st.floats(1e6, 1e9),
    st.floats(0.0, 0.2),
    st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(10_000, 10_000_000)), min_size=1, max_size=12),
)
def test_rate_and_delay_of_a_link_are_found(
    rate_bps: float, latency_s: float, messages: list[tuple[float, int]]
) -> None:
    """Messages queue for a link of constant rate; one probe is sent before each of them in turn."""
    observer, free_s, now_s = Observer(), 0.0, 0.0
    for step in range(len(messages)):
        events = []
        for number, (pause_s, size_bytes) in enumerate(messages):
            now_s += pause_s
            begun_s = max(now_s, free_s)
            if number == step:
                events.append(probe(now_s, begun_s + latency_s, step))
            free_s = begun_s + 8 * size_bytes / rate_bps
            events.append(send(now_s, free_s + latency_s, microbatch=number, size_bytes=size_bytes, step=step))
        # The path is idle before the next step.
        now_s = free_s + 1.0
        (path,) = observer.observe(events, step, PLAN).paths
        assert path.latency_s == pytest.approx(latency_s, abs=1e-6)
        assert path.rate_bps == pytest.approx(rate_bps, rel=1e-3)
        assert path.queue_s >= 0


def test_backups_and_migrations_keep_the_path_busy() -> None:
    backup = Event(EventKind.BACKUP, "a", "b", -1, -1, -1, 2, "K", 0.0, 0.0, 100, arrived_s=10.0)
    events = [probe(0.0, 0.0), backup, send(0.0, 11.0), compute("a", 0.0, 1.0)]
    observation = Observer().observe(events, 3, PLAN)
    assert observation.paths == (PathObservation("a", "b", 110, ((0.0, 11.0),), 0.0, queue_s=5.0),)
    assert observation.end_s == 1.0


@given(st.integers(1, 40))
def test_every_path_is_probed_before_its_first_message_within_the_window(messages: int) -> None:
    turns = [probe_turn(step, messages) for step in range(WINDOW_STEPS)]
    assert turns[0] == 0
    assert set(turns) == set(range(min(messages, WINDOW_STEPS)))


def test_each_direction_is_a_path_of_its_own() -> None:
    back = Event(EventKind.SEND, "b", "a", 0, 1, 0, 3, "B", 5.0, 5.0, 30, arrived_s=7.0)
    paths = Observer().observe([back, send(0.0, 1.0)], 3, PLAN).paths
    assert [(path.source, path.target, path.size_bytes) for path in paths] == [("a", "b", 10), ("b", "a", 30)]


def test_a_step_ends_with_its_last_event() -> None:
    assert (
        Observer()
        .observe([compute("a", 0.0, 2.0), compute("b", 1.0, 5.0), compute("a", 5.0, 9.0, step=4)], 3, PLAN)
        .end_s
        == 5
    )


def test_sends_that_took_no_time_say_nothing() -> None:
    assert Observer().observe([send(1.0, 1.0, size_bytes=0)], 3, PLAN).paths == ()


def test_compute_is_summed_by_device_and_other_steps_are_passed_over() -> None:
    events = [compute("b", 0.0, 2.0), compute("a", 0.0, 1.0), compute("a", 4.0, 6.0), compute("a", 0.0, 9.0, step=2)]
    observation = Observer().observe(events, 3, PLAN)
    assert observation.compute_s == (("a", 3.0), ("b", 2.0))
    assert (observation.step, observation.plan, observation.paths) == (3, PLAN, ())


def test_the_order_of_events_does_not_matter() -> None:
    events = [send(1.0, 4.0), send(3.0, 6.0, microbatch=1), probe(1.0, 1.5), compute("a", 0.0, 1.0)]
    assert Observer().observe(events, 3, PLAN) == Observer().observe(events[::-1], 3, PLAN)
