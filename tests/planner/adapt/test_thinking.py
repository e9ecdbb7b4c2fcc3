"""Policies that think for long: training goes on, steps are seen once and in order, and late answers count late."""

import time
from dataclasses import dataclass, replace

import pytest

from executor.backend import TorchBackend
from planner.adapt.adaptation import Adaptation
from planner.adapt.observation import Observation
from planner.adapt.policy import DECISION_LAG_STEPS
from planner.adapt.thinking import LONGEST_WAIT_S, Thinking
from planner.plan.plan import Plan, Replica
from planner.runs.event_totals import step_ends_s
from planner.scenario.scenario import Scenario
from sim.simulator import Simulator
from tests.helpers.scenarios.builders import chain_plan, chain_scenario, layered_plan, mesh_scenario
from tests.helpers.strategies.scripted_policy import Scripted


def two_plans() -> tuple[Scenario, Plan, Plan]:
    scenario = chain_scenario([0.01, 0.01], [0.02, 0.02], global_batch=8)
    plan = chain_plan(scenario, microbatches=[2] * 4)
    return scenario, plan, replace(plan, order="dynamic")


@dataclass
class Slow:
    """A call of the policy that is over at second ``over_s`` of the run."""

    proposed: Plan | None
    over_s: float

    def is_over(self, until_s: float) -> bool:
        return self.over_s <= until_s

    def answer(self) -> Plan | None:
        return self.proposed


def test_an_answer_counts_from_the_first_step_without_a_plan_and_no_observation_is_lost() -> None:
    scenario, plan, other = two_plans()
    policy = Scripted({1: other})
    adaptation = Adaptation(policy, plan, scenario)
    # Step k ends at k seconds. The policy thinks about step 1 until 3.5 s, and about the others for no time.
    thinking = Thinking(adaptation, lambda seen: Slow(adaptation.propose(seen), 3.5 if seen.step == 1 else seen.step))
    decisions = [thinking.finish_step(step, [], (), float(step)) for step in range(7)]
    (decision,) = (each for each in decisions if each is not None)
    assert decisions.index(decision) == 4
    assert (decision.observed_step, decision.first_step) == (1, 4 + DECISION_LAG_STEPS)
    assert [adaptation.plan_for(step) for step in (5, 6)] == [plan, other]
    assert [seen.step for seen in policy.seen] == list(range(7))


def test_a_step_waits_for_all_new_answers_together_no_longer_than_for_one() -> None:
    scenario, plan, _ = two_plans()
    policy = Scripted({})
    adaptation = Adaptation(policy, plan, scenario)
    over_s = {0: 2.5, 1: 3.0 + LONGEST_WAIT_S / 2, 2: 3.0 + 2 * LONGEST_WAIT_S}
    thinking = Thinking(adaptation, lambda seen: Slow(adaptation.propose(seen), over_s.get(seen.step, 9.0)))
    for step in range(4):
        thinking.finish_step(step, [], (), float(step))
    # Step 3 has waited for the answer on step 1, and in vain for that on step 2.
    assert [seen.step for seen in policy.seen] == [0, 1, 2]


def moved() -> tuple[Scenario, Plan, Plan]:
    """Three devices; a plan of the first two, and one of the first and the last."""
    scenario = mesh_scenario(3, [0.1] * 2, [0.2] * 2, link=lambda a, b: (8e6, 0.02), global_batch=4)
    plan = layered_plan(scenario, [([(1, 1, 2), (2, 1, 1)], [1] * 4)])
    (pipeline,) = plan.pipelines
    first, last = pipeline.stages
    last = replace(last, replicas=(Replica("device-2"),))
    return scenario, plan, replace(plan, pipelines=(replace(pipeline, stages=(first, last)),))


def test_an_answer_that_names_a_device_which_has_left_meanwhile_is_dropped() -> None:
    scenario, plan, other = moved()
    for away, latest in ((), other), (("device-2",), plan), (("device-1",), other):
        adaptation = Adaptation(Scripted({0: other}), plan, scenario)
        thinking = Thinking(adaptation, lambda seen, to=adaptation: Slow(to.propose(seen), 0.5))  # type: ignore[misc]
        assert thinking.finish_step(0, [], (), 0.0) is None
        thinking.finish_step(1, [], away, 1.0)
        assert adaptation.latest == latest


def test_an_answer_is_dropped_when_devices_are_lost() -> None:
    scenario, plan, other = two_plans()
    policy = Scripted({0: other, 1: other})
    adaptation = Adaptation(policy, plan, scenario)
    thinking = Thinking(adaptation, lambda seen: Slow(adaptation.propose(seen), 9.0))
    for step in range(3):
        assert thinking.finish_step(step, [], (), float(step)) is None
    thinking.settle()
    assert [seen.step for seen in policy.seen] == [0]
    assert adaptation.latest == plan


class Sleeper(Scripted):
    """Sleeps about step 2 for ``thinking_s`` seconds, and says so; other steps take no time."""

    def __init__(self, thought_s: float, other: Plan) -> None:
        super().__init__({2: other})
        self._thought_s = thought_s
        self.thinking_s = 0.0
        self.sleeps = False

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        self.thinking_s = self._thought_s if observation.step == 2 else 0.0
        if self.sleeps:
            time.sleep(self.thinking_s)
        return super().decide(observation, plan)


@pytest.mark.parametrize("thought_s", [0.0, LONGEST_WAIT_S / 2, 0.7])
def test_a_simulated_policy_holds_up_no_step_and_decides_later(thought_s: float) -> None:
    scenario, plan, other = two_plans()
    policy = Sleeper(thought_s, other)
    simulated = Simulator().run(scenario, plan, policy, 20)
    (decision,) = simulated.decisions
    ends_s = step_ends_s(simulated.events)
    # While it thinks, steps are as long as before; only the plan of the next step may wait, for `LONGEST_WAIT_S`.
    undisturbed_s = step_ends_s(Simulator().run(scenario, plan, None, 20).events)
    at = decision.first_step - 1
    assert undisturbed_s[at] <= ends_s[at] <= undisturbed_s[at] + LONGEST_WAIT_S
    if thought_s <= LONGEST_WAIT_S:
        assert decision.first_step == 2 + DECISION_LAG_STEPS
    else:
        announced = next(step for step, end_s in enumerate(ends_s) if end_s >= ends_s[2] + thought_s)
        assert decision.first_step == announced + DECISION_LAG_STEPS


@pytest.mark.timed
def test_a_real_decision_is_late_by_as_many_steps_as_the_simulated_one() -> None:
    scenario, plan, other = two_plans()
    (simulated,) = Simulator().run(scenario, plan, Sleeper(0.7, other), 10).decisions
    policy = Sleeper(0.7, other)
    policy.sleeps = True
    (decision,) = TorchBackend("paced").run(scenario, plan, policy, 10).decisions
    assert abs(decision.first_step - simulated.first_step) <= 1
    assert [seen.step for seen in policy.seen] == list(range(10))
