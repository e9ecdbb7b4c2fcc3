"""The rules of diloco-decoupled: how much it counts, what workers take over and give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.plan.decoupled import StateRequests, WorkerLayers
from planner.plan.outer_rounds import Contribution, merging_weights, share_of_workers
from planner.plan.outer_step import OuterStep


def test_the_mean_is_weighted_by_samples() -> None:
    contributions = [Contribution(0, 9, 10, 0), Contribution(1, 4, 5, 0)]
    assert merging_weights(contributions, {0: 2, 1: 12}) == [0.25, 0.75]


def test_a_version_without_the_own_pseudo_gradient_is_taken_over_if_none_is_under_way() -> None:
    layers = WorkerLayers(0, 4, OuterStep(overlap_steps=3), {0: 0})
    layers.arrive(0, 1, -1)
    assert layers.take_over(3) == {0: False}
    assert layers.send(3, 8.0)[0] == Contribution(0, 3, 4, 1, 8.0, 8.0)
    layers.arrive(0, 2, -1)
    assert not layers.take_over(4)
    assert not layers.send(7, 16.0)
    layers.arrive(0, 3, 3)
    assert layers.take_over(8) == {0: True}
    # It contains the progress since the pseudo-gradient before, and leads away from the version taken over last.
    assert layers.send(11, 20.0)[0] == Contribution(0, 11, 8, 3, 20.0, 23.0)
    layers.arrive(0, 4, 3)
    assert layers.take_over(None) == {0: False}


def test_workers_that_join_at_the_same_time_ask_different_ones() -> None:
    requests = StateRequests(4)
    assert requests.ask(0, [0, 1], [1, 2]) == 1
    assert requests.ask(3, [0, 1], [0, 1, 2]) == 1
    assert requests.owed_by(1, [0, 1, 2]) == {0: [0, 1], 3: [0, 1]}
    assert requests.owed_by(1, [1]) == {0: [1], 3: [1]}
    assert requests.ask(0, [0], [2]) == 2
    assert requests.answer(0, [0]) == [0]
    assert requests.answer(0, [0, 1]) == [1]
    requests.forget(3, [0])
    assert requests.answer(3, [0, 1]) == [1]


def test_a_worker_that_has_joined_gives_nothing_until_it_has_sent() -> None:
    requests = StateRequests(3)
    assert requests.ask(0, [0], []) is None
    assert requests.ask(1, [0], [0]) is None
    requests.note_sent(0)
    assert requests.ask(2, [0], [0, 1]) == 0


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.lists(st.integers(1, 9), min_size=6, max_size=6))
def test_the_shares_of_workers_that_meet_in_groups_add_up_to_one(groups: list[int], samples: list[int]) -> None:
    """All train equally fast; each group has an outer step of its own, in turn."""
    earlier: dict[int, tuple[int, int]] = {}
    version, total = 0, 0.0
    for cycle in range(3):
        for group in sorted(set(groups)):
            merged = {worker: samples[worker] for worker, own in enumerate(groups) if own == group}
            version += 1
            total += share_of_workers(merged, earlier) if cycle == 2 else 0.0
            earlier |= {worker: (version, count) for worker, count in merged.items()}
    assert total == pytest.approx(1.0)


def test_a_worker_that_is_gone_does_not_lessen_the_outer_steps_of_the_others() -> None:
    earlier = {0: (20, 20), 1: (20, 20), 2: (10, 20), 3: (20, 20)}
    assert share_of_workers({0: 20, 1: 20}, earlier) == 1
    # One that has returned counts by itself: three others have trained since it was merged last.
    assert share_of_workers({2: 5}, earlier) == 5 / 65
    assert share_of_workers({0: 20, 1: 20, 2: 5}, earlier) == pytest.approx(40 / 45 + 5 / 65)
