from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.in_flight import fitting_depths, latency_aware_depths, plain_depths
from planner.cost.memory import needed_bytes
from planner.plan.plan import Replica, Stage
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, mesh_scenario


def test_plain_depths_are_those_of_1f1b() -> None:
    assert plain_depths(4) == (4, 3, 2, 1)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6))
def test_without_transfers_and_latency_equal_stages_need_plain_depths(compute_s: list[float]) -> None:
    stages = len(compute_s)
    zeros = [0.0] * (stages - 1)
    assert latency_aware_depths([compute_s[0]] * stages, zeros, zeros) == plain_depths(stages)
    # Unequal ones never need more: each stage is at most the slowest.
    assert latency_aware_depths(compute_s, zeros, zeros) == plain_depths(stages)


def test_latency_aware_depths_by_hand() -> None:
    # Round trips 4 + 4 + 2 (1 + 3) = 16 and 4, the slowest stage 4.
    assert latency_aware_depths([4.0, 4.0], [1.0], [3.0]) == (4, 1)
    assert latency_aware_depths([4.0, 4.0], [1.0], [3.1]) == (ceil(16.2 / 4), 1)
    # A link that is slower than every stage sets the pace.
    assert latency_aware_depths([1.0, 1.0], [8.0], [0.0]) == (3, 1)


def test_fitting_depths_follow_memory_and_never_grow() -> None:
    # 8,000 bytes of states, 1,000 per sample: two samples in flight fit.
    scenario = chain_scenario([1.0] * 3, [1.0] * 3, memory_bytes=10_500)
    stages = chain_plan(scenario).pipelines[0].stages
    assert fitting_depths((5, 4, 3), stages, scenario, (1,) * 8) == (2, 2, 2)
    assert fitting_depths((5, 1, 3), stages, scenario, (1,) * 8) == (2, 1, 1)
    assert fitting_depths((5, 4, 3), stages, scenario, (2,) * 4) == (1, 1, 1)
    assert fitting_depths((5, 4, 3), stages, scenario, (3,) * 4) is None
    assert fitting_depths((5, 4, 3), stages, scenario, (1,)) == (1, 1, 1)


def test_states_that_do_not_fit_leave_no_depth() -> None:
    scenario = chain_scenario([1.0], [1.0], memory_bytes=7_999, activation_bytes=0)
    assert fitting_depths((1,), chain_plan(scenario).pipelines[0].stages, scenario, (1,)) is None


@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 40_000))
def test_fitting_depths_use_what_there_is(width: int, samples: int, memory_bytes: int) -> None:
    scenario = mesh_scenario(width, [1.0], [1.0], memory_bytes=memory_bytes + 1, global_batch=samples)
    (stage,) = layered_plan(scenario, [([(1, width, 1)], [samples] * 50)]).pipelines[0].stages
    fitted = fitting_depths((50,), (stage,), scenario, (samples,) * 50)
    most = max(end - first for first, end in stage.intervals(samples))
    depth = fitted[0] if fitted else 0
    if depth:
        assert needed_bytes(scenario, stage, most, depth) <= memory_bytes + 1
    if depth < 50:
        assert needed_bytes(scenario, stage, most, depth + 1) > memory_bytes + 1


def test_memory_by_hand() -> None:
    scenario = chain_scenario([1.0] * 2, [1.0] * 2, parameter_bytes=100, activation_bytes=10)
    # Parameters and gradients of two layers; 3 microbatches of 4 samples in flight.
    stage = Stage(0, 2, (Replica("device-0"),), 3)
    assert needed_bytes(scenario, stage, samples=4, in_flight=3) == pytest.approx(2 * 2 * 100 + 3 * 4 * 20)
