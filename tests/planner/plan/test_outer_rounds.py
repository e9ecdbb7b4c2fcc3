"""When a syncer takes an outer step: the quorum, the grace, and workers that are lost."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from planner.plan.outer_rounds import Contribution, Rounds
from planner.plan.outer_step import OuterStep


def test_a_replaced_worker_counts_once() -> None:
    rounds = Rounds(2, OuterStep())
    rounds.arrive(Contribution(0, 3, 4, 0), 1.0)
    rounds.arrive(Contribution(0, 5, 2, 0), 2.0)
    assert rounds.due_s == inf
    rounds.arrive(Contribution(1, 3, 4, 0), 3.0)
    assert rounds.due_s == 3.0
    assert [(each.worker, each.step) for each in rounds.take()] == [(0, 5), (1, 3)]


def test_a_lost_worker_is_not_awaited_until_it_is_back() -> None:
    rounds = Rounds(3, OuterStep())
    rounds.arrive(Contribution(0, 3, 4, 0), 1.0)
    rounds.lose(1, 2.0)
    assert rounds.due_s == inf
    rounds.lose(2, 3.0)
    assert rounds.due_s == 3.0
    rounds.take()
    rounds.rejoin(1)
    rounds.arrive(Contribution(0, 7, 4, 1), 5.0)
    assert rounds.due_s == inf
    rounds.arrive(Contribution(1, 7, 4, 1), 6.0)
    assert rounds.due_s == 6.0


def test_a_fixed_quorum_stays_when_workers_are_lost() -> None:
    rounds = Rounds(3, OuterStep(quorum=2, grace_s=5.0))
    rounds.lose(1, 0.0)
    rounds.lose(2, 0.0)
    rounds.arrive(Contribution(0, 3, 4, 0), 1.0)
    assert rounds.due_s == inf
    rounds.rejoin(2)
    rounds.arrive(Contribution(2, 3, 4, 0), 2.0)
    # Nobody else is awaited, so that no grace is given.
    assert rounds.due_s == 2.0


def test_the_way_back_is_longer_by_what_compression_saves() -> None:
    rounds = Rounds(2, OuterStep(quorum=1, grace_s=None, compression="bf16"))
    rounds.arrive(Contribution(0, 9, 10, 0, sent_s=10.0, wanted_s=15.0), 11.0)
    assert rounds.due_s == 13.0


def test_a_clock_that_is_behind_lengthens_no_grace() -> None:
    rounds = Rounds(2, OuterStep(quorum=1, grace_s=None, compression="int4", density=0.02))
    rounds.arrive(Contribution(0, 9, 10, 0, sent_s=10.05, wanted_s=11.0), 10.0)
    assert rounds.due_s == 11.0


def test_without_the_times_of_a_worker_nobody_is_awaited() -> None:
    """So it is after a checkpoint of an earlier version."""
    rounds = Rounds(2, OuterStep(quorum=1, grace_s=None))
    rounds.arrive(Contribution(0, 9, 10, 0), 11.0)
    assert rounds.due_s == 11.0


@given(
    st.permutations(range(4)),
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0, 9), st.floats(0.01, 3), st.floats(0, 9)), min_size=4, max_size=4),
)
def test_an_adaptive_grace_delays_no_worker_beyond_the_quorum(
    order: list[int], quorum: int, times_s: list[tuple[float, float, float]]
) -> None:
    rounds = Rounds(4, OuterStep(quorum=quorum, grace_s=None))
    spare_s, there_s = inf, 0.0
    for count, worker in enumerate(order, 1):
        sent_s, way_s, overlap_s = times_s[worker]
        # Arrivals come in order.
        there_s = max(there_s, sent_s + way_s)
        if rounds.due_s < there_s:
            return
        rounds.arrive(Contribution(worker, 1, 1, 0, sent_s, sent_s + overlap_s), there_s)
        spare_s = min(spare_s, sent_s + overlap_s - (there_s - sent_s))
        if count < quorum:
            assert rounds.due_s == inf
        elif count == 4:
            assert rounds.due_s == there_s
        else:
            assert rounds.due_s == max(there_s, spare_s)
