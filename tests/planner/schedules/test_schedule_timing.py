"""When actions start: workers one action at a time, channels one transfer at a time, first come, first served."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.benches.planning.pipeline_families import Times, problem_of
from planner.plan.actions import parse_action
from planner.schedules.kernel.annealing import split_backwards
from planner.schedules.kernel.problem import Orders
from planner.schedules.kernel.timing import finish_s, start_times_s
from traces.common.errors import InputError


def orders_of(*rows: str) -> Orders:
    return Orders.from_actions([[parse_action(text) for text in row.split()] for row in rows])


def test_a_channel_carries_one_transfer_at_a_time_and_latency_comes_after() -> None:
    problem = problem_of([Times(2, 3, 4, 5, 10), Times(2, 3, 4)], [1, 1], np.inf)
    orders = orders_of("0F0 0F1 0I0 0W0 0B1", "1F0 1I0 1F1 1B1 1W0")
    # F0 of stage 0 ends at 2, its transfer is through at 7 and there at 17; that of F1 waits from 4 to 7 and is there
    # at 22. I0 of stage 1 ends at 22, its gradient is there at 37; B1 ends at 31, its gradient is there at 46.
    assert start_times_s(problem, orders).tolist() == [0, 2, 37, 40, 46, 17, 19, 22, 24, 31]
    assert finish_s(problem, orders) == 53


def test_stages_of_two_workers_share_one_channel_each_way() -> None:
    problem = problem_of([Times(1, 1, 1, 4, 0)] * 4, [1], np.inf)
    apart = orders_of("0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0 3B0")
    assert finish_s(problem, apart) == 4 + 3 * 4 + 4 * 2 + 3 * 4
    v_shaped = replace(problem, workers=(0, 1, 1, 0), capacity_bytes=np.full(2, np.inf))
    # Nothing takes time between stages 1 and 2.
    assert finish_s(v_shaped, orders_of("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")) == 4 + 2 * 4 + 4 * 2 + 2 * 4
    # Worker 0 makes two activations for worker 1, of stages 0 and 2: the second waits until the first is through.
    looped = replace(problem_of([Times(1, 1, 1, 4, 0)] * 4, [1, 1], np.inf), workers=(0, 1, 0, 1))
    looped = replace(looped, capacity_bytes=np.full(2, np.inf))
    orders = orders_of("0F0 2F0 0F1 2F1 2B0 0B0 2B1 0B1", "1F0 3F0 3B0 1F1 3F1 3B1 1B0 1B1")
    starts_s = start_times_s(looped, orders)
    # F0 of stage 2 begins at 10 and ends at 11, F1 of stage 0 follows and ends at 12; its transfer waits until 15.
    assert starts_s[:3].tolist() == [0, 10, 11]
    assert starts_s[8 + 3] == 19


def test_orders_that_wait_for_each_other_are_refused() -> None:
    problem = problem_of([Times(), Times()], [1, 1], np.inf)
    with pytest.raises(InputError, match="the order of actions deadlocks: worker 0 never receives what 0B0 needs"):
        finish_s(problem, orders_of("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    with pytest.raises(InputError, match="worker 0 never receives what 0W0 needs"):
        finish_s(problem_of([Times()], [1], np.inf), orders_of("0F0 0W0 0I0"))


def test_a_whole_backward_is_an_input_gradient_and_a_weight_gradient_in_one() -> None:
    problem = problem_of([Times(1, 2, 3)], [1, 1], np.inf)
    orders = orders_of("0F0 0B0 0F1 0B1")
    split = split_backwards(orders)
    assert [str(action) for action in split.actions(0)] == ["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"]
    assert finish_s(problem, orders) == finish_s(problem, split) == 12
