"""Checks that training by two ranks gives the same result as training in one process, in several variants."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from safetensors.torch import load_file
from torch import nn

from executor.backend import TorchBackend
from executor.training.data.order import DataOrder
from executor.training.models.loading import load_model, load_with_sizes
from executor.training.models.trainable import own_data
from experiments.benches.result import Check, at_most
from experiments.benches.simulation.predicted import TrainedCase
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer
from traces.common.atomic import scratch_folder


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a training: the ``losses`` of all steps, and the final ``parameters`` by name, on the CPU."""

    losses: tuple[float, ...]
    parameters: Mapping[str, torch.Tensor]


def train_in_one_process(scenario: Scenario, steps: int, device: torch.device) -> Trained:
    """Train a scenario's model in float32 by stochastic gradient descent with momentum, in a plain loop of torch."""
    training = scenario.training
    assert scenario.code is not None, "there is something to train"
    assert training.optimizer.name == "momentum"
    model = load_model(scenario.code, training.seed)
    layers = nn.Sequential(*model.layers).to(device)
    rule = training.optimizer
    optimizer = torch.optim.SGD(layers.parameters(), lr=rule.learning_rate, momentum=rule.momentum)
    data = DataOrder(own_data(model), training.seed)
    losses = []
    for step in range(steps):
        inputs, targets = data.samples(step * training.global_batch, training.global_batch)
        optimizer.zero_grad()
        loss = model.loss(layers(inputs.to(device)), targets.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(tuple(losses), {name: value.detach().cpu() for name, value in layers.named_parameters()})


# Largest allowed differences: float32 sums are added in another order; bfloat16 rounds a number by up to 0.4 %.
MOST_FLOAT32 = 1e-5
MOST_BFLOAT16 = 0.02


@dataclass(frozen=True, slots=True)
class TrainingCase:
    """A variant of training by two ranks, whose result must equal that of one process.

    Attributes:
        precision: Number format in which layers compute.
        recompute: Whether both stages keep only their inputs and recompute the activations in the backward.
        replicas: Whether both ranks hold all layers and sum gradients; otherwise each holds half of the layers.
        group: Whether both ranks share every layer as a tensor-parallel group.
    """

    name: str
    schedule: str
    precision: str = "fp32"
    recompute: bool = False
    replicas: bool = False
    group: bool = False


WAYS = (
    TrainingCase("1f1b", "1f1b"),
    TrainingCase("zb-h1, backward split", "zb-h1"),
    TrainingCase("1f1b, recomputed", "1f1b", recompute=True),
    TrainingCase("zb-h1, backward split, recomputed", "zb-h1", recompute=True),
    TrainingCase("two replicas", "1f1b", replicas=True),
    TrainingCase("zb-h1, bf16", "zb-h1", precision="bf16"),
)

GROUP = TrainingCase("tensor-parallel group", "1f1b", group=True)


def check_training(
    case: TrainedCase, device: torch.device, ways: Sequence[TrainingCase], tell: Callable[[str], None]
) -> list[Check]:
    """Check that training by two ranks gives the losses and the parameters of training in one process.

    A check holds a variant's largest difference, divided by 1 + the expected value. For bfloat16 it compares only the
    losses, with those of training in float32.
    """
    scenario = replace(
        case.scenario, training=replace(case.scenario.training, optimizer=Optimizer("momentum", learning_rate=0.05))
    )
    expected = train_in_one_process(scenario, case.steps, device)
    checks = []
    for way in ways:
        name = f"{case.name}, {way.name}"
        tell(f"training, {name}")
        plan = _plan(case, way)
        # The devices of a group are in one machine.
        cluster = replace(case, host="machine").scenario.cluster if way.group else scenario.cluster
        chosen = replace(in_precision(scenario, way.precision), cluster=cluster)
        with scratch_folder() as folder:
            target = folder / "parameters.safetensors"
            record = TorchBackend("real", parameters=target).run(chosen, plan, None, case.steps)
            trained = Trained(tuple(record.losses), load_file(target))
        exact = way.precision == "fp32"
        difference = largest_difference(trained, expected) if exact else _of_losses(trained, expected)
        checks.append(at_most(name, difference, MOST_FLOAT32 if exact else MOST_BFLOAT16))
    return checks


def in_precision(scenario: Scenario, precision: str) -> Scenario:
    """Return the scenario in another precision, with the sizes that the outputs of its model's layers then have."""
    assert scenario.code is not None, "only a model with code has other sizes"
    sizes = load_with_sizes(scenario.code, scenario.training.seed, precision).sizes
    layers = tuple(
        replace(layer, output_bytes=size.output.size_bytes)
        for layer, size in zip(scenario.model.layers, sizes, strict=True)
    )
    model = replace(scenario.model, layers=layers)
    return replace(scenario, model=model, training=replace(scenario.training, precision=precision))


def largest_difference(trained: Trained, expected: Trained) -> float:
    """Return the largest difference of a loss or a parameter, divided by 1 + the expected value.

    The difference is infinite if a value is not finite, or if only one of the two has a parameter.
    """
    return max(_of_losses(trained, expected), parameter_difference(trained.parameters, expected.parameters))


def parameter_difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of a parameter, divided by 1 + the expected value."""
    if found.keys() != expected.keys():
        return float("inf")
    return max(_largest(found[name], value) for name, value in expected.items())


def _of_losses(trained: Trained, expected: Trained) -> float:
    return _largest(torch.tensor(trained.losses), torch.tensor(expected.losses))


def _largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape or not bool(torch.isfinite(found).all()):
        return float("inf")
    return float(((found - expected).abs() / (1 + expected.abs())).max())


def _plan(case: TrainedCase, way: TrainingCase) -> Plan:
    scenario = case.scenario
    plan = case.plan(scenario, way.schedule)
    (pipeline,) = plan.pipelines
    names = [device.name for device in scenario.cluster.devices]
    if way.replicas or way.group:
        replicas = (Replica(names[0], 1.0, tuple(names[1:])),) if way.group else tuple(map(Replica, names))
        stage = Stage(0, len(scenario.model.layers), replicas, in_flight=1)
        return replace(plan, pipelines=(Pipeline((stage,), pipeline.microbatches),))
    stages = tuple(replace(stage, recompute=way.recompute) for stage in pipeline.stages)
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))
