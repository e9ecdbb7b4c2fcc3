"""What is learned from steps: speeds of devices, and what sums take."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.cannikin.opt_perf import batch_time_s
from planner.systems.cannikin.speed_learning import (
    CHANGED,
    NodeTimes,
    SpeedLearner,
    SumLearner,
    inverse_variance_mean,
    measured_nodes,
    measured_sums,
    samples_per_microbatch,
)
from planner.systems.cannikin.step_model import NO_SUMS, NodeSpeed, SumTimes
from planner.systems.cannikin.strategy import nominal_sums, plan_of_samples
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import mesh_scenario

SPEED = NodeSpeed(1e-3, 4e-3, 2e-3, 6e-3)


def times(speed: NodeSpeed, samples: float, factor: float = 1.0) -> NodeTimes:
    return NodeTimes(samples, factor * speed.forward_s(samples), factor * speed.backward_s(samples))


def test_one_point_gives_a_line_through_the_origin_and_two_give_the_line() -> None:
    learner = SpeedLearner()
    assert not learner.knows("a")
    learner.observe("a", times(SPEED, 10))
    assert learner.knows("a")
    assert not learner.has_line("a")
    assert learner.speed("a").forward_fixed_s == 0
    assert learner.speed("a").forward_s(10) == pytest.approx(SPEED.forward_s(10))
    learner.observe("a", times(SPEED, 30))
    assert learner.has_line("a")
    found = learner.speed("a")
    assert [found.forward_s(70), found.backward_s(70)] == pytest.approx([SPEED.forward_s(70), SPEED.backward_s(70)])


@given(st.floats(0.1, 10), st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_a_device_that_changes_its_speed_is_known_again(factor: float, later: list[int]) -> None:
    learner = SpeedLearner()
    for samples in (1, 60):
        learner.observe("a", times(SPEED, samples))
    for samples in later:
        learner.observe("a", times(SPEED, samples, factor))
    found = learner.speed("a")
    for samples in (1, 20, 60):
        expected = factor * (SPEED.forward_s(samples) + SPEED.backward_s(samples))
        # A change that is too small to be one is averaged with what was known.
        assert found.forward_s(samples) + found.backward_s(samples) == pytest.approx(expected, rel=CHANGED + 0.02)


def test_jitter_is_averaged() -> None:
    learner = SpeedLearner()
    for index in range(16):
        factor = 1.04 if index % 2 else 0.96
        learner.observe("a", times(SPEED, 10 if index % 4 < 2 else 40, factor))
    found = learner.speed("a")
    assert found.forward_s(25) == pytest.approx(SPEED.forward_s(25), rel=0.01)


def test_a_changed_device_with_one_sample_count_is_learned_anew() -> None:
    learner = SpeedLearner()
    learner.observe("a", times(SPEED, 10))
    learner.observe("a", times(SPEED, 10, 3.0))
    assert learner.speed("a").forward_s(10) == pytest.approx(3 * SPEED.forward_s(10))


def test_a_share_that_varies_less_counts_more() -> None:
    assert inverse_variance_mean([0.1, 0.4], [1e-3, 2e-3]) == pytest.approx((2 * 0.1 + 0.4) / 3)
    assert inverse_variance_mean([0.1, 0.4], [0.0, 0.0]) == pytest.approx(0.25)
    learner = SumLearner()
    for sway in (-0.1, 0.1, -0.1, 0.1):
        learner.observe([SumTimes(0.2, 1.0, 0.1), SumTimes(0.5 + sway, 1.0, 0.1)])
    assert learner.sums().first_bucket_share == pytest.approx(0.2, abs=0.001)


def test_sums_take_the_least_that_a_device_saw() -> None:
    learner = SumLearner()
    assert learner.sums() == NO_SUMS
    learner.observe([SumTimes(0.2, 3.0, 0.5), SumTimes(0.2, 2.0, 0.6)])
    learner.observe([SumTimes(0.2, 2.5, 0.4), SumTimes(0.2, 4.0, 0.1)])
    # Not 2.0 and 0.1, which no device saw together.
    assert (learner.sums().overlapped_s, learner.sums().last_s) == (2.0, 0.6)


# --- From simulated steps ------------------------------------------------------------------------------------


def data_parallel(samples: Sequence[int], microbatches: int = 1, bandwidth_bps: float = 8e9) -> tuple[Scenario, Plan]:
    """Layers of 60 MB on a device for each number of samples; the profile is proportional to samples."""
    scenario = mesh_scenario(
        len(samples),
        [2e-3] * 4,
        [4e-3] * 4,
        parameter_bytes=[60_000_000] * 4,
        link=lambda a, b: (bandwidth_bps, 1e-4),
        global_batch=sum(samples) * microbatches,
    )
    plan = plan_of_samples(scenario, "hand", list(scenario.cluster.by_name), samples, (sum(samples),) * microbatches)
    return scenario, plan


@pytest.mark.parametrize("microbatches", [1, 3])
def test_devices_are_measured_as_their_profile_says(microbatches: int) -> None:
    scenario, plan = data_parallel([8, 4, 1], microbatches)
    events = list(Simulator().run(scenario, plan, None, 2).events)
    assert samples_per_microbatch(plan) == {"device-0": 8, "device-1": 4, "device-2": 1}
    for step in (0, 1):
        measured = measured_nodes(events, step, plan)
        assert set(measured) == set(plan.devices)
        for device, own in samples_per_microbatch(plan).items():
            assert measured[device].samples == own
            assert measured[device].forward_s == pytest.approx(8e-3 * own)
            assert measured[device].backward_s == pytest.approx(16e-3 * own)


def test_sums_are_measured_as_the_links_carry_them() -> None:
    # Devices that are ready at the same time: nobody waits for anybody.
    scenario, plan = data_parallel([4, 4, 4])
    measured = measured_sums(list(Simulator().run(scenario, plan, None, 1).events), 0)
    expected = nominal_sums(scenario, plan.devices, 12)
    # A ring of three sends four times a third of each layer of 60 MB.
    assert expected.overlapped_s == pytest.approx(3 * 4 * (8 * 20e6 / 8e9 + 1e-4))
    assert expected.last_s == pytest.approx(4 * (8 * 20e6 / 8e9 + 1e-4))
    for seen in measured:
        assert seen.overlapped_s == pytest.approx(expected.overlapped_s)
        assert seen.last_s == pytest.approx(expected.last_s)
        assert seen.first_bucket_share == pytest.approx(0.25) == expected.first_bucket_share


def test_without_buckets_all_sums_come_after_backward() -> None:
    scenario, plan = data_parallel([4, 4, 4])
    (seen, *_) = measured_sums(list(Simulator().run(scenario, plan.without_overlap, None, 1).events), 0)
    assert seen.overlapped_s == 0
    assert seen.first_bucket_share == 1


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=4), st.floats(1e9, 1e11))
def test_the_model_is_what_the_simulator_does(samples: list[int], bandwidth_bps: float) -> None:
    scenario, plan = data_parallel(samples, 1, bandwidth_bps)
    speeds = [NodeSpeed(8e-3, 0.0, 16e-3, 0.0)] * len(samples)
    sums = nominal_sums(scenario, plan.devices, sum(samples))
    record = Simulator().run(scenario, replace(plan), None, 1)
    # The model has two bounds, the first bucket's and the last one's; between these are two more buckets of equal size,
    # which bind at most where both nearly do: the step may take up to a sum longer.
    took_s = max(event.end_s for event in record.events)
    predicted_s = batch_time_s(samples, speeds, sums)
    assert predicted_s <= took_s * (1 + 1e-6)
    assert took_s <= predicted_s + sums.last_s
