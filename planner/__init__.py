"""Plans: what is trained where, how it is planned, checked, adapted and measured."""

from typing import TYPE_CHECKING

from traces.common.faces import lazy_face

if TYPE_CHECKING:
    from planner.check import check_plan as check_plan
    from planner.files.plan import read_plan as read_plan
    from planner.files.plan import write_plan as write_plan
    from planner.files.scenario import read_scenario as read_scenario
    from planner.plan.plan import Plan as Plan
    from planner.scenario.cluster import Cluster as Cluster
    from planner.scenario.cluster import Device as Device
    from planner.scenario.cluster import Link as Link
    from planner.scenario.profile import ModelProfile as ModelProfile
    from planner.scenario.scenario import Scenario as Scenario
    from planner.scenario.training import Training as Training
    from planner.step.evaluate import step_time_s as step_time_s
    from planner.systems.registry import make_plan as make_plan
    from planner.systems.registry import make_policy as make_policy
else:
    __all__, __getattr__, __dir__ = lazy_face(
        __name__,
        {
            "planner.scenario.scenario": ("Scenario",),
            "planner.scenario.cluster": ("Cluster", "Device", "Link"),
            "planner.scenario.profile": ("ModelProfile",),
            "planner.scenario.training": ("Training",),
            "planner.plan.plan": ("Plan",),
            "planner.check": ("check_plan",),
            "planner.step.evaluate": ("step_time_s",),
            "planner.systems.registry": ("make_plan", "make_policy"),
            "planner.files.scenario": ("read_scenario",),
            "planner.files.plan": ("read_plan", "write_plan"),
        },
    )
