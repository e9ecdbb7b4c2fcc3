"""Training whose regions own data equals training in one process on the same samples of each region."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from executor.backend import TorchBackend
from executor.core.job import CheckpointConfig
from executor.training.models.loading import load_model
from executor.validate import check_supported
from planner.files.plan import write_plan
from planner.files.resolved_scenario import write_resolved_scenario
from planner.plan.plan import Plan, Synchronisation
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import BatchLimits, Optimizer
from tests.helpers.processes.asynchronous import Recursion, in_step
from tests.helpers.processes.command import ropebridge
from tests.helpers.processes.training import MODELS, hybrid_plan, regional_batch, training_scenario
from tests.helpers.strategies.manual_transport import Pipelines
from traces.common.errors import InputError

CODE = ModelCode(MODELS / "digits.py", {"width": 8, "depth": 2, "by_class": True})
TOLERANCE = 1e-5


def regional_scenario(regions: list[str]) -> Scenario:
    scenario = training_scenario(CODE, len(regions), optimizer=Optimizer("sgd", 0.2), regions=regions)
    return replace(scenario, data={"north": 200, "south": 100})


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("method", "every"), [("asgd", 1), ("asgd-ga", 2), ("ma", 2)])
def test_pipelines_train_on_samples_of_their_regions(method: str, every: int) -> None:
    scenario = regional_scenario(["north", "south"])
    plan = hybrid_plan(scenario, "1f1b", [([(3, [1.0])], [5, 3]), ([(3, [1.0])], [4])])
    plan = replace(plan, synchronisation=Synchronisation(method, interval_steps=every, staleness_bound=0))
    pipelines, expected = Pipelines(scenario, plan, 6), Recursion(scenario, plan)
    for _ in range(6):
        for p in range(2):
            pipelines.step(p)
            expected.step(p)
        pipelines.network.deliver_all()
        for pair, messages in expected.in_the_air.items():
            while messages:
                expected.deliver(*pair)
    pipelines.finish()
    expected.finish()
    for p, compute in enumerate(pipelines.computes):
        assert_near(dict(compute.named_parameters()), dict(expected.parameters(p)))


def test_real_pipelines_of_replicas_do_so(tmp_path: Path) -> None:
    scenario = regional_scenario(["north", "north", "south"])
    plan = hybrid_plan(scenario, "1f1b", [([(3, [1.0, 3.0])], [8]), ([(3, [1.0])], [4])])
    plan = replace(plan, synchronisation=Synchronisation("asgd-ga", interval_steps=2, staleness_bound=0))
    target = tmp_path / "parameters.safetensors"
    record = TorchBackend("real", parameters=target).run(scenario, plan, None, 6)
    expected = in_step(scenario, plan, 6)
    assert record.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert_near(load_file(target), dict(expected.parameters(1)))


def summed(scenario: Scenario, steps: int, samples: dict[str, int]) -> list[float]:
    """The losses of SGD in one process, on the samples of all regions."""
    assert scenario.code is not None
    model = load_model(scenario.code, scenario.training.seed)
    layers = nn.Sequential(*model.layers)
    optimizer = torch.optim.SGD(layers.parameters(), scenario.training.optimizer.learning_rate)
    losses = []
    for step in range(steps):
        parts = [regional_batch(model, step, scenario, region, count) for region, count in samples.items()]
        inputs, targets = (torch.cat(each) for each in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = model.loss(layers(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
def test_sums_over_replicas_in_regions_resume_with_another_plan(tmp_path: Path) -> None:
    """A stage has replicas in both regions; then each region has a pipeline, and the samples are the same."""
    scenario = regional_scenario(["north", "south", "north"])
    one = hybrid_plan(scenario, "1f1b", [([(3, [1.0, 1.0, 1.0])], [6, 6])])
    folder = tmp_path / "checkpoints"
    first = TorchBackend("real", checkpoints=CheckpointConfig(folder, 3)).run(scenario, one, None, 3)
    placed = [scenario.cluster.devices[index] for index in (1, 0, 2)]
    other = hybrid_plan(
        replace(scenario, cluster=replace(scenario.cluster, devices=tuple(placed))),
        "1f1b",
        [([(3, [1.0])], [4]), ([(1, [1.0]), (2, [1.0])], [3, 5])],
    )
    rest = TorchBackend("real", checkpoints=CheckpointConfig(folder, 3, 3)).run(scenario, other, None, 6)
    expected = summed(scenario, 6, {"north": 8, "south": 4})
    assert [*first.losses, *rest.losses] == pytest.approx(expected, rel=TOLERANCE)


def refused(scenario: Scenario, plan: Plan) -> str:
    check_supported(plan, scenario, "paced", "none")
    with pytest.raises(InputError) as caught:
        check_supported(plan, scenario, "real", "none")
    return str(caught.value)


def test_samples_and_targets_stay_in_their_region(tmp_path: Path) -> None:
    scenario = regional_scenario(["north", "south"])
    across = hybrid_plan(scenario, "1f1b", [([(1, [1.0]), (2, [1.0])], [12])])
    expected = "pipelines[0]: the last stage, in region 'south', needs the targets of samples that 'north' stores; "
    assert expected in refused(scenario, across)
    write_resolved_scenario(scenario, tmp_path / "scenario.json")
    write_plan(across, tmp_path / "plan.json")
    done = ropebridge("run", "scenario.json", "--plan", "plan.json", cwd=tmp_path)
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1), done.stderr
    assert expected in done.stderr
    elsewhere = hybrid_plan(scenario, "1f1b", [([(3, [1.0, 1.0])], [12])])
    found = refused(replace(scenario, data={"north": 5}), elsewhere)
    assert "device 'device-1' reads samples, but its region 'south' stores none; begin the pipeline in north" in found
    adaptive = replace(scenario.training, batch=BatchLimits(12, 24, "linear"))
    found = refused(replace(scenario, training=adaptive), elsewhere)
    assert found.startswith("training.batch: the batch cannot change where regions own data, ")
