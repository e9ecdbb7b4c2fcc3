"""Pipelines without a barrier settle before checkpoints: nothing is lost or applied twice, and all are equal then."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from executor.backend import TorchBackend
from executor.core.job import CheckpointConfig
from executor.recovery.claim import resumption
from planner.plan.exchange_steps import Exchanges
from planner.plan.plan import Plan, Synchronisation
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Optimizer
from tests.helpers.processes.asynchronous import in_step
from tests.helpers.processes.training import MODELS, hybrid_plan, train_in_one_process, training_scenario
from tests.helpers.strategies.manual_transport import Pipelines

CODE = ModelCode(MODELS / "digits.py", {"width": 8, "depth": 2})


@given(
    st.integers(1, 5),
    st.integers(0, 12),
    st.integers(1, 25),
    st.integers(0, 7),
    st.dictionaries(st.integers(1, 24), st.integers(1, 5), max_size=3),
)
def test_exchanges_are_those_of_counting_step_by_step(
    interval: int, first: int, count: int, settle_every: int, changes: dict[int, int]
) -> None:
    steps = first + count
    exchanges = Exchanges(interval, first, steps, settle_every)
    intervals = {first + step: every for step, every in sorted(changes.items()) if step < count}
    before = interval
    for step, every in dict(intervals).items():
        exchanges.change(step, every)
        if every == before:
            del intervals[step]
        before = every
    since, after = 0, []
    for step in range(first, steps):
        assert exchanges.before(step) == len(after)
        interval = intervals.get(step, interval)
        since += 1
        ends_run = bool(settle_every) and step + 1 == steps
        if since == interval or ends_run or exchanges.settles(step + 1) or step + 1 in intervals:
            after.append(step)
            since = 0
        assert exchanges.follows(step) == (after[-1:] == [step])
    assert exchanges.before(steps) == len(after)
    assert [exchanges.last_step(number) for number in range(len(after))] == after
    assert [exchanges.end_of(number) for number in range(len(after) + 1)] == [first, *(step + 1 for step in after)]
    for step in range(max([first, *intervals]), steps) if settle_every else ():
        end = next((later for later in range(step + 1, steps) if exchanges.settles(later)), steps)
        assert exchanges.last_before_settling(step) == exchanges.before(end) - 1


def two_regions(method: str, every: int, bound: int | None, replicas: int = 1) -> tuple[Scenario, Plan]:
    regions = ["north"] * replicas + ["south"]
    scenario = training_scenario(CODE, len(regions), optimizer=Optimizer("sgd", 0.2), regions=regions)
    plan = hybrid_plan(scenario, "1f1b", [([(3, [1.0] * replicas)], [6]), ([(3, [1.0])], [6])])
    return scenario, replace(plan, synchronisation=Synchronisation(method, interval_steps=every, staleness_bound=bound))


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=8)
@given(
    st.sampled_from([("asgd", 1), ("asgd-ga", 3), ("ma", 1), ("ma", 3)]),
    st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=2, max_size=2),
)
def test_pipelines_are_equal_when_they_settle_whatever_came_before(how: tuple[str, int], timing: list) -> None:
    """Updates that arrive early or late: before the next span all of them are applied, once."""
    scenario, plan = two_regions(*how, None)
    pipelines = Pipelines(scenario, plan, 8, settle_every=4)
    for span in range(2):
        left = [4, 4]
        for happening in timing[span]:
            if happening < 2 and left[happening]:
                pipelines.step(happening)
                left[happening] -= 1
            elif happening >= 2:
                sender, receiver = happening - 2, 3 - happening
                if pipelines.network.waiting(f"device-{sender}", f"device-{receiver}"):
                    pipelines.deliver(sender, receiver)
        # The first step of the next span settles, so that the last one of this span stays out.
        for p in range(2):
            for _ in range(left[p]):
                pipelines.step(p)
        pipelines.network.deliver_all()
        if span == 0:
            for interpreter in pipelines.interpreters:
                interpreter.close(before=4)
        else:
            pipelines.finish()
        one, other = (dict(compute.named_parameters()) for compute in pipelines.computes)
        assert_near(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "every"), [("asgd-ga", 2), ("ma", 2)])
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(method: str, every: int, tmp_path: Path) -> None:
    scenario, plan = two_regions(method, every, 0, replicas=2)
    folder, target = tmp_path / "checkpoints", tmp_path / "parameters.safetensors"
    first = TorchBackend("real", checkpoints=CheckpointConfig(folder, 3)).run(scenario, plan, None, 5)
    assert resumption(folder, scenario, 9, print) == (5, plan)
    backend = TorchBackend("real", parameters=target, checkpoints=CheckpointConfig(folder, 3, 5))
    rest = backend.run(scenario, plan, None, 9)
    expected = in_step(scenario, plan, 9, settlements=(3, 5, 6, 9))
    assert [*first.losses, *rest.losses] == pytest.approx(expected.losses, rel=1e-5)
    assert_near(load_file(target), dict(expected.parameters(1)))


@pytest.mark.slow
def test_settling_before_every_step_is_training_in_step_and_so_is_what_follows(tmp_path: Path) -> None:
    """The plan after the checkpoint sums gradients over all devices."""
    scenario, plan = two_regions("asgd", 1, None)
    folder = tmp_path / "checkpoints"
    first = TorchBackend("real", checkpoints=CheckpointConfig(folder, 1)).run(scenario, plan, None, 4)
    summed = replace(plan, synchronisation=Synchronisation())
    rest = TorchBackend("real", checkpoints=CheckpointConfig(folder, 1, 4)).run(scenario, summed, None, 8)
    assert [*first.losses, *rest.losses] == pytest.approx(train_in_one_process(scenario, 8).losses, rel=1e-5)
