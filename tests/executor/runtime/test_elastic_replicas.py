"""Replicas come and go while pipelines train without a barrier: what is learnt stays the same, in both backends."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from executor.backend import TorchBackend
from planner.events.event import EventKind
from planner.plan.plan import Plan, Replica, Synchronisation
from planner.runs.metrics import measure
from planner.runs.record import RunRecord
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Optimizer
from sim.simulator import Simulator
from tests.helpers.processes.asynchronous import in_step
from tests.helpers.processes.training import MODELS, hybrid_plan, training_scenario
from tests.helpers.strategies.scripted_policy import Scripted

CODE = ModelCode(MODELS / "digits.py", {"width": 8, "depth": 2})
STEPS = 9


def elastic(method: str, every: int) -> tuple[Scenario, Plan, Scripted]:
    """The first region rents a device before step 3, in the middle of an interval; the second one gives one back."""
    regions = ["north", "north", "south", "south"]
    scenario = training_scenario(CODE, 4, optimizer=Optimizer("sgd", 0.2), regions=regions)
    plan = hybrid_plan(scenario, "1f1b", [([(3, [1.0, 1.0])], [6]), ([(3, [1.0, 2.0])], [6])])

    def rented(*names: tuple[str, ...]) -> Plan:
        pipelines = [
            replace(pipeline, stages=(replace(pipeline.stages[0], replicas=tuple(map(Replica, own))),))
            for pipeline, own in zip(plan.pipelines, names, strict=True)
        ]
        how = Synchronisation(method, interval_steps=every, staleness_bound=0)
        return replace(plan, pipelines=tuple(pipelines), synchronisation=how)

    first = rented(("device-0",), ("device-2", "device-3"))
    later = {1: rented(("device-0", "device-1"), ("device-2",)), 4: rented(("device-0",), ("device-2", "device-1"))}
    return scenario, first, Scripted(later)


def exchanged(record: RunRecord) -> list[tuple[str, str, int]]:
    updates = (event for event in record.events if event.kind is EventKind.UPDATE)
    return sorted((event.peer, event.device, event.step) for event in updates)


@pytest.mark.parametrize(
    ("method", "every"),
    [("asgd-ga", 2), *(pytest.param(*how, marks=pytest.mark.slow) for how in [("asgd", 1), ("ma", 1), ("ma", 2)])],
)
def test_what_is_learnt_does_not_depend_on_who_is_rented(method: str, every: int, tmp_path: Path) -> None:
    scenario, plan, policy = elastic(method, every)
    target = tmp_path / "parameters.safetensors"
    record = TorchBackend("real", parameters=target).run(scenario, plan, policy, STEPS)
    assert [decision.first_step for decision in record.decisions] == [3, 6]
    expected = in_step(scenario, plan, STEPS)
    assert record.losses == pytest.approx(expected.losses, rel=1e-5)
    torch.testing.assert_close(load_file(target), dict(expected.parameters(1)), rtol=1e-5, atol=1e-5)
    simulated = Simulator().run(scenario, plan, elastic(method, every)[2], STEPS)
    assert exchanged(record) == exchanged(simulated)
    assert measure(record).wan_bytes == measure(simulated).wan_bytes


@pytest.mark.parametrize(
    "method", [pytest.param("asgd-ga", marks=pytest.mark.slow), pytest.param("ma", marks=pytest.mark.slow)]
)
def test_the_number_of_steps_between_exchanges_may_change(method: str, tmp_path: Path) -> None:
    """The sums of an interval that a change ends are sent before the next one begins."""
    scenario, plan, _ = elastic(method, 3)

    def exchanging(every: int) -> Plan:
        return replace(plan, synchronisation=replace(plan.synchronisation, interval_steps=every))

    def policy() -> Scripted:
        return Scripted({2: exchanging(2), 5: exchanging(4)})

    target = tmp_path / "parameters.safetensors"
    record = TorchBackend("real", parameters=target).run(scenario, plan, policy(), 12)
    assert [decision.first_step for decision in record.decisions] == [4, 7]
    assert "steps between exchanges 3 -> 2" in record.decisions[0].change
    expected = in_step(scenario, plan, 12, changes={4: 2, 7: 4})
    assert record.losses == pytest.approx(expected.losses, rel=1e-5)
    torch.testing.assert_close(load_file(target), dict(expected.parameters(1)), rtol=1e-5, atol=1e-5)
    simulated = Simulator().run(scenario, plan, policy(), 12)
    assert exchanged(record) == exchanged(simulated)
    assert sorted({step for *_, step in exchanged(record)}) == [2, 3, 5, 6, 10]
