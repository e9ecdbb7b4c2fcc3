"""A scaled scenario is the whole one with fewer bytes and less time."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.reproductions.executed.execution import (
    scaled,
)
from planner.runs.metrics import measure
from planner.systems.registry import make_plan
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from traces.generators.presets import preset

STEPS = 4


@given(smaller=st.sampled_from([1.0, 2.0, 16.0]), quicker=st.floats(0.5, 20.0), seed=st.integers(0, 20))
def test_all_takes_so_many_times_less(smaller: float, quicker: float, seed: int) -> None:
    scenario = chain_scenario(
        [2e-3, 1e-3, 3e-3],
        [2e-3, 2e-3, 1e-3],
        output_bytes=[64_000] * 3,
        parameter_bytes=6400,
        bandwidth_bps=1e7,
        latency_s=0.01,
    )
    trace = preset("lte", duration_s=60.0, seed=seed)
    links = tuple(replace(link, trace=trace) for link in scenario.cluster.links)
    scenario = replace(scenario, cluster=replace(scenario.cluster, links=links))
    plan = chain_plan(scenario)
    whole = measure(Simulator().run(scenario, plan, None, STEPS))
    part = measure(Simulator().run(scaled(scenario, smaller, quicker), plan, None, STEPS))
    assert part.step_s * quicker == pytest.approx(whole.step_s, rel=1e-9)
    assert part.wan_bytes * smaller == pytest.approx(whole.wan_bytes, rel=1e-9)


def test_a_plan_of_the_whole_one_fits_what_is_scaled() -> None:
    from experiments.reproductions.deepcee.scenarios import deepcee_scenario

    scenario = deepcee_scenario("workstations", "gpt-1.3b", 1e9, 0.01)
    plans = [make_plan(name, scenario) for name in ("deepcee", "megatron")]
    small = scaled(scenario, 100.0, 3.0)
    ratios = [
        measure(Simulator().run(each, plans[0], None, STEPS)).samples_per_s
        / measure(Simulator().run(each, plans[1], None, STEPS)).samples_per_s
        for each in (scenario, small)
    ]
    assert ratios[1] == pytest.approx(ratios[0], rel=2e-3)
