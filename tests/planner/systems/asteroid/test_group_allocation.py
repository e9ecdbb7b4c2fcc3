from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from planner.systems.asteroid.stage_costs import allocate


def linear(seconds_per_sample: float, samples: int) -> list[float]:
    return [seconds_per_sample * count for count in range(samples + 1)]


def test_samples_go_in_proportion_to_speed() -> None:
    assert allocate(12, [linear(1.0, 12), linear(2.0, 12)], [12, 12]) == (8, 4)


def test_what_memory_does_not_hold_goes_to_the_others() -> None:
    assert allocate(12, [linear(1.0, 12), linear(2.0, 12), linear(2.0, 12)], [3, 12, 12]) == (3, 5, 4)


def test_samples_move_where_times_are_not_linear() -> None:
    # A whole microbatch takes the first device 12 s, the second 9 s; but three samples only 3 s and 4.5 s.
    assert allocate(6, [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 12.0], linear(1.5, 6)], [6, 6]) == (4, 2)


def test_too_little_memory_is_no_allocation() -> None:
    assert allocate(5, [linear(1.0, 5)] * 2, [2, 2]) is None


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, list[list[float]], list[int]]:
    samples = draw(st.integers(1, 6))
    devices = draw(st.integers(1, 3))
    rises = st.lists(st.floats(0.1, 5), min_size=samples, max_size=samples)
    times_s = [
        [sum(column[:count]) for count in range(samples + 1)]
        for column in draw(st.lists(rises, min_size=devices, max_size=devices))
    ]
    most = draw(st.lists(st.integers(0, samples), min_size=devices, max_size=devices))
    return samples, times_s, most


@given(groups())
def test_all_samples_are_placed_within_memory_and_no_single_move_helps(
    group: tuple[int, list[list[float]], list[int]],
) -> None:
    samples, times_s, most = group
    counts = allocate(samples, times_s, most)
    if sum(most) < samples:
        assert counts is None
        return
    assert counts is not None
    assert sum(counts) == samples
    assert all(count <= limit for count, limit in zip(counts, most, strict=True))
    slowest_s = max(column[count] for column, count in zip(times_s, counts, strict=True))
    # Times that rise with samples: moving single samples from the slowest reaches the best of all allocations.
    every = (c for c in product(*(range(limit + 1) for limit in most)) if sum(c) == samples)
    best_s = min(max(column[count] for column, count in zip(times_s, c, strict=True)) for c in every)
    assert slowest_s <= best_s + 1e-9
