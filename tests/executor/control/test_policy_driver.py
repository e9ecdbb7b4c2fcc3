"""What the policy of a job is shown when ranks are lost while the others regroup."""

from collections.abc import Collection

import pytest

from executor.control.policy_driver import PolicyDriver
from planner.adapt.adaptation import Adaptation
from planner.adapt.observation import Observation
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from tests.helpers.scenarios.builders import mesh_scenario

NAMES = [f"device-{index}" for index in range(4)]
SCENARIO = mesh_scenario(4, [0.1] * 2, [0.1] * 2, link=lambda a, b: (1e9, 0.0), global_batch=4)


def on(*devices: int) -> Plan:
    """One stage with a replica on each device."""
    stage = Stage(0, 2, tuple(Replica(NAMES[each]) for each in devices), 1)
    return Plan(SCENARIO.name, SCENARIO.model.name, "test", "1f1b", (Pipeline((stage,), (4,)),))


class Leaving:
    """Goes on with the devices that are left, or waits for them; keeps what it is shown."""

    def __init__(self, waits: bool) -> None:
        self.waits, self.shown = waits, list[tuple[tuple[str, ...], tuple[str, ...]]]()

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        self.shown.append((observation.gone, observation.away))
        left = [index for index, name in enumerate(NAMES) if name not in observation.away]
        return None if self.waits else on(*left)


def lose_one_after_the_other(policy: Leaving, *losses: Collection[str]) -> None:
    """As a regrouping does: it repeats with all lost devices when another one is lost meanwhile."""
    driver = PolicyDriver(
        on(0, 1, 2, 3),
        0,
        0,
        NAMES,
        Adaptation(policy, on(0, 1, 2, 3), SCENARIO),
        lambda _: None,
        None,
        None,
        lambda _: None,
        lambda _: None,
        10,
    )
    for gone in losses:
        (first, *_) = driver.lose_devices(0, [*gone], [*gone], [], 1.0)
        assert policy.waits or not set(first.plan.devices) & set(gone)


@pytest.mark.parametrize("waits", [False, True])
def test_a_second_loss_is_shown_without_the_devices_that_the_plan_has_left(waits: bool) -> None:
    policy = Leaving(waits)
    lose_one_after_the_other(policy, ["device-1"], ["device-1", "device-3"])
    again = ("device-1", "device-3") if waits else ("device-3",)
    assert policy.shown == [(("device-1",), ("device-1",)), (again, ("device-1", "device-3"))]
