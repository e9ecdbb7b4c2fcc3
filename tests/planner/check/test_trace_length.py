"""A trace that ends must not end before the run can be over."""

from dataclasses import replace

import numpy as np
import pytest

from executor.backend import TorchBackend
from planner.check.paths import check_traces_last, outlasted_traces, step_at_least_s
from planner.scenario.effects import ComputeEffects, Effects, Slowdown, Straggler
from planner.scenario.scenario import Scenario
from tests.helpers.scenarios.builders import chain_plan, chain_scenario
from traces.common.errors import InputError
from traces.trace import LinkTrace

# 2 microbatches of 3 s on the first device, of 2 s on the second.
ENDS = LinkTrace(np.zeros(1), np.array([1e9]), 20.0, loops=False, ends=True)


def scenario(trace: LinkTrace) -> Scenario:
    return chain_scenario([1.0, 1.0], [2.0, 1.0], trace=trace, global_batch=2)


def test_a_trace_that_lasts_is_accepted() -> None:
    made = scenario(ENDS)
    assert step_at_least_s(made, chain_plan(made)) == 6.0
    check_traces_last(made, chain_plan(made), 3)


def test_a_trace_that_ends_too_early_is_refused() -> None:
    made = scenario(ENDS)
    with pytest.raises(InputError) as caught:
        check_traces_last(made, chain_plan(made), 4)
    assert str(caught.value) == (
        "cluster.links[0].trace: the trace of link region-0->region-1 ends at 20 s, but 4 steps last 24 s or more; "
        "let it loop ('after: loop') or give a longer one, or run at most 3 steps"
    )


@pytest.mark.parametrize("trace", [replace(ENDS, ends=False), replace(ENDS, ends=False, loops=True)])
def test_a_trace_that_holds_or_loops_lasts_for_ever(trace: LinkTrace) -> None:
    made = scenario(trace)
    check_traces_last(made, chain_plan(made), 4000)


def test_a_link_that_nobody_uses_may_end() -> None:
    made = scenario(ENDS)
    plan = chain_plan(made)
    alone = replace(plan.pipelines[0], stages=(replace(plan.pipelines[0].stages[0], end_layer=2),))
    check_traces_last(made, replace(plan, pipelines=(alone,)), 4000)


@pytest.mark.parametrize(
    ("compute", "step_s"),
    [
        (ComputeEffects(stragglers=(Straggler("device-1", 2.0),)), 8.0),
        (ComputeEffects(slowdowns=(Slowdown("device-0", (0.0, 5.0), (0.5, 2.0)),)), 4.0),
        (ComputeEffects(slowdowns=(Slowdown("device-0", (0.0, 5.0), (0.25, 0.5)),)), 12.0),
    ],
)
def test_effects_on_compute_count(compute: ComputeEffects, step_s: float) -> None:
    made = replace(scenario(ENDS), effects=Effects(compute=compute))
    assert step_at_least_s(made, chain_plan(made)) == step_s


def test_a_real_run_is_refused_alike_and_says_what_could_not_be_known_before() -> None:
    made = scenario(ENDS)
    with pytest.raises(InputError, match="but 4 steps last 24 s or more"):
        TorchBackend("paced", emulator="shaper").run(made, chain_plan(made), None, 4)
    short = scenario(replace(ENDS, duration_s=0.5))
    quick = replace(short, model=scenario_in(1e-2).model)
    told: list[str] = []
    TorchBackend("paced", emulator="shaper", tell=told.append).run(quick, chain_plan(quick), None, 8)
    assert any("ends at 0.5 s: from then on the link had its last rate" in line for line in told)
    assert not list(outlasted_traces(quick, chain_plan(quick), 0.4))


def scenario_in(unit_s: float) -> Scenario:
    return chain_scenario([unit_s, unit_s], [2 * unit_s, unit_s], trace=ENDS, global_batch=2)
