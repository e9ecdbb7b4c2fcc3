"""What a policy may change of a plan that runs, and what it may not."""

from dataclasses import replace

import pytest
from builders import layered_plan, mesh_scenario

from planner.adaptation import Adaptation
from planner.observation import Observation
from planner.plan import Plan, Synchronisation
from planner.scenario import Scenario
from traces.errors import RunError


class Always:
    """Wants one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        return self._plan


def running() -> tuple[Scenario, Plan]:
    scenario = mesh_scenario(2, [1.0], [1.0], global_batch=4, regions=["north", "south"])
    return scenario, layered_plan(scenario, [([(1, 1, 1)], [1, 1])] * 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("synchronisation", Synchronisation("asgd")),
        ("synchronisation", Synchronisation(bucket_bytes=1000)),
        ("connections", 2),
        ("compression", "int8"),
    ],
)
def test_what_is_set_up_once_stays(field: str, value: object) -> None:
    scenario, plan = running()
    adaptation = Adaptation(Always(replace(plan, **{field: value})), plan, scenario)
    with pytest.raises(RunError, match=f"after step 0 policy Always changes '{field}' from .*, which a running job"):
        adaptation.finish_step(0, [])
    assert adaptation.plan_for(2) == plan


def test_what_each_step_may_have_for_itself() -> None:
    scenario, plan = running()
    changed = [
        replace(
            pipeline,
            stages=tuple(replace(stage, in_flight=2, recompute=True) for stage in pipeline.stages),
            microbatches=(pipeline.samples,),
        )
        for pipeline in plan.pipelines
    ]
    other = replace(
        plan,
        strategy="another",
        schedule="gpipe" if plan.schedule != "gpipe" else "1f1b",
        order="dynamic",
        pipelines=tuple(changed),
    )
    adaptation = Adaptation(Always(other), plan, scenario)
    assert adaptation.finish_step(0, []) is not None
    assert adaptation.plan_for(2) == other
