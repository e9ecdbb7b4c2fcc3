"""The rule by which a free worker takes the best action that is ready."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.benches.planning.pipeline_families import Times, problem_of
from experiments.benches.planning.schedules import LATENCY_SHARES, latency_shares
from planner.schedules.dynamic import dynamic_orders
from planner.schedules.kernel.problem import SchedulingProblem
from planner.schedules.kernel.timing import finish_s
from traces.common.errors import InputError


def rows(problem: SchedulingProblem, split: bool) -> list[str]:
    orders = dynamic_orders(problem, split)
    return [" ".join(map(str, orders.actions(worker))) for worker in range(orders.worker_count)]


def test_backward_goes_before_forward_and_weights_fill_the_gaps() -> None:
    problem = problem_of([Times(latency_s=1.5)] * 2, [1] * 3, np.inf)
    # Stage 0 waits from 3 on: the first gradient is there at 6. Stage 1 is never without F or I until its last I.
    assert rows(replace(problem, in_flight=(3, 3)), split=True) == [
        "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2",
    ]


def test_depth_holds_forwards_back() -> None:
    problem = replace(problem_of([Times(latency_s=2)] * 2, [1] * 3, np.inf), in_flight=(1, 1))
    assert rows(problem, split=False) == ["0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_memory_forces_weights_before_the_next_forward() -> None:
    problem = problem_of([Times()], [1] * 3, 1)
    assert rows(problem, split=True) == ["0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"]
    assert rows(replace(problem, capacity_bytes=np.array([2.0])), split=True) == ["0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2"]


def test_of_equals_the_earliest_microbatch_then_the_latest_stage() -> None:
    problem = problem_of([Times()] * 2, [1] * 2, np.inf)
    alone = replace(problem, workers=(0, 0), capacity_bytes=np.array([np.inf]))
    assert rows(alone, split=False) == ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"]


def test_room_is_kept_for_the_later_stages_of_a_worker() -> None:
    problem = problem_of([Times()] * 2, [1] * 4, np.inf)
    alone = replace(problem, workers=(0, 0), capacity_bytes=np.array([2.0]))
    # Two F of stage 0 would fill the memory for ever.
    assert finish_s(alone, dynamic_orders(alone, split=False)) == 4 * 6
    with pytest.raises(InputError, match="worker 0 has room for 1 bytes of activations, but one microbatch of each"):
        dynamic_orders(replace(alone, capacity_bytes=np.array([1.0])), split=False)


def test_the_table_of_latencies() -> None:
    found = {latency_s: latency_shares(latency_s) for latency_s in LATENCY_SHARES}
    for latency_s, expected in LATENCY_SHARES.items():
        whole = 2 if latency_s < 2 else 4
        assert found[latency_s][:whole] == pytest.approx(expected[:whole], abs=0.0006)
    # An arrival at the very moment at which a worker becomes free is seen, which gains here.
    assert found[0][2:] == pytest.approx((0.970, 0.970), abs=0.0006)
    assert found[1][2:] == pytest.approx((0.780, 0.897), abs=0.0006)
