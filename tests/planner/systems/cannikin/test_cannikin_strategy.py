"""Plans of unequal shares: cannikin, lb-bsp, adaptdl."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check_plan
from planner.plan.plan import Plan
from planner.scenario.cluster import Cluster
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.systems.cannikin.opt_perf import batch_time_s
from planner.systems.cannikin.strategy import (
    BUCKET_BYTES,
    fitting_samples,
    nominal_sums,
    plan_of_samples,
    profiled_speed,
)
from planner.systems.registry import make_plan
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_scenario, mesh_scenario
from traces.common.errors import InputError

UNEVEN = ("cannikin", "lb-bsp", "adaptdl")
FAST_BPS, SLOW_BPS = 1e12, 2e8


def unlike(
    times_s: list[float], *, bandwidth_bps: float = FAST_BPS, batch: int = 60, parameter_bytes: int = 30_000_000
) -> Scenario:
    """Devices that take so long for a sample of each of three layers; backward takes twice as long."""
    scenario = chain_scenario(
        [0.0] * len(times_s),
        [0.0] * len(times_s),
        bandwidth_bps=bandwidth_bps,
        global_batch=batch,
        parameter_bytes=parameter_bytes,
    )
    (layer, *_) = scenario.model.layers
    tables = {
        kind: replace(table, forward_s=(time_s,), backward_input_s=(time_s,), backward_weight_s=(time_s,))
        for (kind, table), time_s in zip(layer.times.items(), times_s, strict=True)
    }
    layers = tuple(replace(layer, name=f"layer-{index}", times=tables) for index in range(3))
    return replace(scenario, model=replace(scenario.model, layers=layers))


def samples_of(plan: Plan) -> list[int]:
    return [int(replica.share) for replica in plan.pipelines[0].stages[0].replicas]


def test_shares_follow_the_speeds() -> None:
    scenario = unlike([1e-3, 2e-3, 3e-3], batch=110)
    assert samples_of(make_plan("lb-bsp", scenario)) == [60, 30, 20]
    assert samples_of(make_plan("cannikin", scenario)) == [60, 30, 20]
    assert samples_of(make_plan("adaptdl", scenario)) == [37, 37, 36]


@pytest.mark.parametrize("name", UNEVEN)
def test_sums_overlap_with_backward_in_buckets(name: str) -> None:
    plan = make_plan(name, unlike([1e-3, 2e-3]))
    assert plan.synchronisation.bucket_bytes == BUCKET_BYTES == 26_214_400
    assert len(plan.pipelines[0].stages) == 1


@settings(max_examples=40)
@given(
    st.lists(st.floats(5e-4, 5e-3), min_size=2, max_size=4),
    st.sampled_from([SLOW_BPS, 2e9, 2e10, FAST_BPS]),
    st.integers(8, 200),
)
def test_cannikins_steps_are_the_shortest_by_its_model(times_s: list[float], bandwidth_bps: float, batch: int) -> None:
    scenario = unlike(times_s, bandwidth_bps=bandwidth_bps, batch=batch)
    names = list(scenario.cluster.by_name)
    speeds = [profiled_speed(scenario, name, batch) for name in names]
    sums = nominal_sums(scenario, names, batch)

    def model_s(name: str) -> float:
        plan = make_plan(name, scenario)
        shares = {replica.device: replica.share for replica in plan.pipelines[0].stages[0].replicas}
        return batch_time_s([shares.get(device, 0) for device in names], speeds, sums)

    assert model_s("cannikin") <= min(model_s("lb-bsp"), model_s("adaptdl")) * (1 + 1e-9)


def test_balance_makes_the_simulated_step_shorter() -> None:
    scenario = unlike([1e-3, 2e-3, 6e-3], bandwidth_bps=2e10)
    steps_s = {name: step_time_s(make_plan(name, scenario), scenario) for name in ("ddp", *UNEVEN)}
    assert steps_s["cannikin"] <= steps_s["lb-bsp"] < steps_s["adaptdl"] <= steps_s["ddp"]
    for name in UNEVEN:
        record = Simulator().run(scenario, make_plan(name, scenario), None, 1)
        assert max(event.end_s for event in record.events) == pytest.approx(steps_s[name])


def test_a_device_that_no_sample_pays_on_is_left_out() -> None:
    plan = make_plan("cannikin", unlike([1e-3, 1.0], batch=10))
    assert plan.devices == ("device-0",)
    assert samples_of(plan) == [10]


def test_memory_bounds_the_share_of_a_fast_device() -> None:
    scenario = unlike([1e-3, 1e-3], batch=20, parameter_bytes=4000)
    small, large = scenario.cluster.devices
    # Three layers of 8,000 bytes of states, and 3,000 bytes a sample: room for four samples.
    cluster = Cluster((replace(small, memory_bytes=36_000), large), scenario.cluster.links)
    scenario = replace(scenario, cluster=cluster)
    assert [fitting_samples(scenario, name) for name in cluster.by_name] == [4, 20]
    plan = make_plan("cannikin", scenario)
    assert samples_of(plan) == [4, 16]
    # Even shares are cut into as many microbatches as the small one needs.
    assert make_plan("adaptdl", scenario).pipelines[0].microbatches == (7, 7, 6)


def test_a_batch_that_does_not_fit_at_once_is_cut_into_the_fewest_microbatches() -> None:
    scenario = mesh_scenario(2, [1.0, 1.0], [1.0, 1.0], global_batch=25, memory_bytes=26_000)
    for name in UNEVEN:
        assert make_plan(name, scenario).pipelines[0].microbatches == (9, 8, 8)


@settings(max_examples=60)
@given(
    st.sampled_from(UNEVEN),
    st.lists(st.floats(1e-4, 1e-2), min_size=1, max_size=5),
    st.lists(st.integers(26_000, 90_000), min_size=5, max_size=5),
    st.integers(1, 60),
)
def test_plans_fit_wherever_one_sample_fits_on_one_device(
    name: str, times_s: list[float], memories: list[int], batch: int
) -> None:
    scenario = unlike(times_s, batch=batch, parameter_bytes=4000)
    devices = (replace(d, memory_bytes=room) for d, room in zip(scenario.cluster.devices, memories, strict=False))
    scenario = replace(scenario, cluster=Cluster(tuple(devices), scenario.cluster.links))
    if max(memories[: len(times_s)]) < 27_000:
        with pytest.raises(InputError, match="the whole model needs"):
            make_plan(name, scenario)
        return
    plan = make_plan(name, scenario)
    check_plan(plan, scenario)
    assert plan.global_batch == batch


def test_a_model_that_fits_nowhere_is_refused_with_what_is_missing() -> None:
    scenario = mesh_scenario(2, [1.0], [1.0], memory_bytes=8_500)
    with pytest.raises(InputError, match="500 bytes more of memory, or a strategy that splits the model"):
        make_plan("cannikin", scenario)


def test_devices_without_samples_are_no_replicas() -> None:
    scenario = mesh_scenario(3, [1.0], [1.0], global_batch=5)
    plan = plan_of_samples(scenario, "hand", ["device-0", "device-1", "device-2"], [3, 0, 2], (5,))
    assert plan.devices == ("device-0", "device-2")
