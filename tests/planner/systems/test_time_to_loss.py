"""Plans to a loss: the time of a step with exchanges, the chosen interval, and regions that are added."""

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.check import check_plan
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Pipeline, Plan, Replica, Stage, Synchronisation
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.convergence import LossLaw
from planner.scenario.effects import Effects
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import Scenario, within_regions
from planner.scenario.training import Training
from planner.systems.regional.loss_plan import COST, TIME, LossGoal
from planner.systems.regional.outer_time import ExchangePaths
from planner.systems.regional.search import plan_to_loss
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import GIB
from traces.common.errors import InputError
from traces.trace import LinkTrace

LAYERS, SAMPLE_S = 4, 0.03


def law(per_worker: float = 0.01, per_interval: float = 0.01) -> LossLaw:
    """Losses of 1 + (samples / 1000)^-0.5, without uncertainty."""
    shape = (0.0, 0.0, math.log(0.5), -50.0, 0.0)
    mean = (*shape, 0.0, per_worker, per_interval, 0.0, 0.0, 0.0, 0.0, 0.0)
    return LossLaw("a made-up law", 1000.0, mean, (mean,), ("diloco", "diloco-streaming"), ("none",), 100, 8)


def regions(speeds: list[float], bandwidth_bps: float, batch: int = 16, size_bytes: int = 400_000) -> Scenario:
    """A device in each region, a sample of which takes `SAMPLE_S` over its speed."""
    tables = {
        f"kind-{number}": TimeTable((1,), *(((SAMPLE_S / 3 / LAYERS / speed,),) * 3))
        for number, speed in enumerate(speeds)
    }
    layers = tuple(LayerProfile(f"layer-{n}", size_bytes, 2_000_000, 1000, tables) for n in range(LAYERS))
    devices = tuple(
        Device(f"device-{n}", f"kind-{n}", f"region-{n}", GIB, price_per_hour=1.0) for n in range(len(speeds))
    )
    pairs = [(one.region, other.region) for one in devices for other in devices if one is not other]
    links = tuple(Link(*pair, bandwidth_bps, 0.001) for pair in pairs)
    model = ModelProfile("model", layers)
    return Scenario("regions", Cluster(devices, links), model, Training(batch), effects=Effects())


def workers(scenario: Scenario, how: Synchronisation) -> Plan:
    devices = scenario.cluster.devices
    each = scenario.training.global_batch // len(devices)
    pipelines = tuple(Pipeline((Stage(0, LAYERS, (Replica(device.name),), 1),), (each,)) for device in devices)
    return Plan(scenario.name, "model", "by hand", "1f1b", pipelines, synchronisation=how)


@pytest.mark.parametrize(
    "how",
    [
        Synchronisation("diloco", interval_steps=5),
        Synchronisation("diloco-streaming", interval_steps=6, outer=OuterStep(fragments=2, overlap_steps=1)),
        # Workers send the next fragment, or the next two, before they wait for this one.
        Synchronisation("diloco-streaming", interval_steps=8, outer=OuterStep(fragments=4, overlap_steps=2)),
        Synchronisation("diloco-streaming", interval_steps=8, outer=OuterStep(fragments=4, overlap_steps=5)),
        Synchronisation("diloco", interval_steps=5, outer=OuterStep(compression="int8", exchange="reduce-scatter")),
        Synchronisation(
            "diloco-streaming",
            interval_steps=6,
            outer=OuterStep(fragments=2, overlap_steps=1, exchange="reduce-scatter"),
        ),
    ],
)
@pytest.mark.parametrize(
    ("speeds", "bandwidth_bps"), [([1.0, 0.5], 2e7), ([1.0, 0.9, 0.8], 5e6), ([1.0, 1.0], 1e9), ([0.5, 1.0] * 3, 4e6)]
)
def test_steps_with_exchanges_take_as_long_as_in_the_simulator(
    how: Synchronisation, speeds: list[float], bandwidth_bps: float
) -> None:
    scenario = regions(speeds, bandwidth_bps, batch=8 * len(speeds))
    plan = workers(scenario, how)
    inner_s = [8 * SAMPLE_S / speed for speed in speeds]
    expected_s = ExchangePaths(plan, scenario).times(how.outer).step_s(inner_s, how.interval_steps, how.outer)
    steps = 20 * how.interval_steps
    ends_s = Simulator().run(scenario, plan, None, steps).metrics["end_s"]
    assert (ends_s.iloc[-1] - ends_s.iloc[steps // 2 - 1]) / (steps // 2) == pytest.approx(expected_s, rel=0.01)


def test_the_time_to_a_loss_is_steps_times_step_time_by_hand() -> None:
    scenario = regions([1.0, 1.0], 1e7)
    found = plan_to_loss(scenario, LossGoal(TIME, 1.5, law()))
    check_plan(found.best.plan, scenario)
    how = found.best.plan.synchronisation
    price = 2**0.01 * how.interval_steps**0.01
    assert found.best.steps.expected == pytest.approx(1000 * price * (1.5 - 1) ** -2 / 16)
    exchange = ExchangePaths(found.best.plan, scenario).times(how.outer)
    # Both workers have half of the batch, and wait for what the overlap does not hide of each fragment.
    waits_s = exchange.transmission_s[:, 0, 1] + exchange.latency_s[:, 0, 1] - how.outer.overlap_steps * 8 * SAMPLE_S
    by_hand_s = 8 * SAMPLE_S + sum(max(0.0, each) for each in waits_s) / how.interval_steps
    assert found.best.step_s == pytest.approx(by_hand_s, rel=1e-6)
    assert found.summed is not None
    assert found.best.time_s < found.summed.time_s


@pytest.mark.slow
def test_slower_links_need_rarer_exchanges_and_dearer_ones_forbid_them() -> None:
    intervals = []
    for bandwidth_bps in (1e8, 1e6):
        best = plan_to_loss(regions([1.0, 1.0], bandwidth_bps), LossGoal(TIME, 1.5, law())).best
        intervals.append(best.plan.synchronisation.interval_steps)
    assert intervals[0] < intervals[1]
    # Two workers would always end above the loss.
    scenario = regions([1.0, 1.0], 1e6)
    best = plan_to_loss(scenario, LossGoal(TIME, 1.5, law(per_worker=1.0))).best
    assert best.plan.synchronisation.method == "allreduce"
    with pytest.raises(InputError, match=r"no method reaches a loss of 0\.9"):
        plan_to_loss(scenario, LossGoal(TIME, 0.9, law()))


def test_steps_over_links_that_vary_are_timed_as_in_the_simulator() -> None:
    steady = regions([1.0, 1.0], 2e7)
    # The same mean rate; in every other ten seconds a tenth of the rate in the others.
    trace = LinkTrace(np.array([0.0, 10.0]), 2e7 * np.array([20, 2]) / 11, 20.0)
    links = tuple(replace(link, trace=trace) for link in steady.cluster.links)
    varying = replace(steady, cluster=replace(steady.cluster, links=links))
    found, expected = (
        plan_to_loss(each, LossGoal(TIME, 1.5, law(per_interval=0.2))).best for each in (varying, steady)
    )
    steps = 40 * found.plan.synchronisation.interval_steps
    ends_s = Simulator().run(varying, found.plan, None, steps).metrics["end_s"]
    assert found.step_s == pytest.approx(ends_s.iloc[-1] / steps, rel=0.15)
    # By its mean rates the other plan promises more than it holds.
    steps = 40 * expected.plan.synchronisation.interval_steps
    other_s = Simulator().run(varying, expected.plan, None, steps).metrics["end_s"].iloc[-1] / steps
    assert expected.step_s < 0.9 * other_s
    assert found.time_s <= 1.05 * other_s * expected.steps.expected


@settings(max_examples=2, deadline=None)
@given(st.integers(0, 10**6))
def test_a_second_region_never_lengthens_the_time_to_a_loss(seed: int) -> None:
    without, with_another = scores(Random(seed), 2)
    assert with_another <= without * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(3, 8))
@example(4006, 4)
def test_one_more_region_never_lengthens_the_time_to_a_loss(seed: int, count: int) -> None:
    without, with_another = scores(Random(seed), count)
    assert with_another <= without * (1 + 1e-9)


@pytest.mark.parametrize("alone", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["no region", "one region"])
def test_of_many_regions_hardly_any_can_be_a_worker(alone: int) -> None:
    """A device alone has no memory for the model, but for the one with more of it."""
    scenario = regions([1.0] * 6, 2e8, batch=12, size_bytes=4_000_000)
    devices = tuple(
        replace(device, memory_bytes=GIB if number < alone else 20_000_000)
        for number, device in enumerate(scenario.cluster.devices)
    )
    scenario = replace(scenario, cluster=replace(scenario.cluster, devices=devices))
    best = plan_to_loss(scenario, LossGoal(TIME, 1.5, law())).best
    check_plan(best.plan, scenario)
    (pipeline,) = best.plan.pipelines
    assert best.mode.method == "allreduce"
    assert alone or len(pipeline.stages) > 1


@pytest.mark.slow
def test_of_many_regions_those_with_the_slowest_links_are_left_out() -> None:
    """The quickest three of nine; the same plan as without them."""
    scenario = regions([2.0] * 3 + [1.0] * 6, 2e8, batch=72, size_bytes=4_000_000)
    far = {f"region-{n}" for n in range(3)}
    links = tuple(
        replace(link, bandwidth_bps=5e5) if far & {link.source, link.target} else link
        for link in scenario.cluster.links
    )
    scenario = replace(scenario, cluster=replace(scenario.cluster, links=links))
    goal = LossGoal(TIME, 1.5, law(per_interval=0.3))
    found, without = (
        plan_to_loss(each, goal).best
        for each in (scenario, within_regions(scenario, {f"region-{n}" for n in range(3, 9)}))
    )
    assert {scenario.cluster.by_name[device].region for device in found.plan.devices}.isdisjoint(far)
    assert found.time_s == pytest.approx(without.time_s)


def scores(random: Random, count: int) -> tuple[float, float]:
    """Return the time or the cost to a loss without the last of ``count`` regions, and with it."""
    speeds = [random.uniform(0.2, 2.0) for _ in range(count)]
    scenario = regions(
        speeds, 10 ** random.uniform(6, 9), random.choice([6, 16, 31]), random.choice([4_000, 4_000_000])
    )
    if random.random() < 0.5:
        links = tuple(replace(link, bandwidth_bps=10 ** random.uniform(6, 9)) for link in scenario.cluster.links)
        scenario = replace(scenario, cluster=replace(scenario.cluster, links=links))
    goal = LossGoal(random.choice([TIME, COST]), random.uniform(1.1, 2.0), law(random.uniform(0, 0.05)))
    fewer = within_regions(scenario, {f"region-{n}" for n in range(count - 1)})

    def score(each: Scenario) -> float:
        best = plan_to_loss(each, goal).best
        return best.time_s if goal.name == TIME else best.cost

    return score(fewer), score(scenario)


def test_a_replaced_law_is_part_of_the_training() -> None:
    scenario = regions([1.0], 1e9)
    training = replace(scenario.training, convergence=law())
    assert hash(training) == hash(replace(training, convergence=law()))
