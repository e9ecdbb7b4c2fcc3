"""Scenarios with real models for tests, and the oracle: training in one process."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from executor.training.models.loading import load_model, load_with_sizes
from executor.training.models.trainable import TrainableModel
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.runs.record import RunRecord
from planner.scenario.cluster import Cluster, Device, Link
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario.scenario import ModelCode, Scenario
from planner.scenario.training import Optimizer, Training

MODELS = Path(__file__).parents[3] / "experiments" / "models"
GPT = ModelCode(MODELS / "gpt.py", {"vocabulary": 32, "width": 32, "heads": 2, "blocks": 4, "length": 16})
CONVOLUTIONAL = ModelCode(MODELS / "convolutional.py", {"width": 8, "scales": 2, "side": 16, "classes": 4})


def training_scenario(
    code: ModelCode,
    devices: int,
    *,
    global_batch: int = 12,
    optimizer: Optimizer | None = None,
    regions: Sequence[str] | None = None,
) -> Scenario:
    """A cluster of equal devices, each linked with each, and a profile of the model's true sizes.

    ``regions`` are those of the devices; one for all of them if None.
    """
    sizes = load_with_sizes(code, seed=0).sizes
    table = TimeTable((1,), (0.001,), (0.001,), (0.001,))
    layers = tuple(
        LayerProfile(f"layer-{index}", size.parameter_bytes, size.output.size_bytes, 1000, {"cpu": table})
        for index, size in enumerate(sizes)
    )
    places = regions or ["here"] * devices
    names = tuple(Device(f"device-{index}", "cpu", place, 2**30) for index, place in enumerate(places))
    cluster = Cluster(names, tuple(Link(a, b, 1e9, 0.0) for a in sorted(set(places)) for b in sorted(set(places))))
    training = Training(global_batch, optimizer=optimizer or Optimizer("momentum", learning_rate=0.05))
    return Scenario("training", cluster, ModelProfile("model", layers), training, code)


def hybrid_plan(
    scenario: Scenario,
    schedule: str,
    pipelines: Sequence[tuple[Sequence[tuple[int, Sequence[float]]], Sequence[int]]],
) -> Plan:
    """Pipelines of ((layers in the stage, shares of its replicas) per stage, microbatch sizes); devices in order."""
    devices = iter(device.name for device in scenario.cluster.devices)
    built = []
    for stages, microbatches in pipelines:
        first, parts = 0, []
        for index, (layers, shares) in enumerate(stages):
            replicas = tuple(Replica(next(devices), share) for share in shares)
            parts.append(Stage(first, first + layers, replicas, in_flight=len(stages) - index))
            first += layers
        built.append(Pipeline(tuple(parts), tuple(microbatches)))
    return Plan(scenario.name, scenario.model.name, "hand", schedule, tuple(built))


def placed_plan(
    scenario: Scenario,
    schedule: str,
    stages: Sequence[tuple[int, int]],
    shares: Sequence[Sequence[float]],
    microbatches: Sequence[int],
    *,
    in_flight: int = 3,
    recompute: Collection[int] = (),
) -> Plan:
    """One pipeline of (layers, worker) per stage; shares of each worker's replicas, which take devices in order.

    ``recompute`` are the stages that do.
    """
    names = iter(device.name for device in scenario.cluster.devices)
    workers = [tuple(Replica(next(names), share) for share in each) for each in shares]
    first, parts = 0, []
    for index, (layers, worker) in enumerate(stages):
        parts.append(Stage(first, first + layers, workers[worker], in_flight, index in recompute))
        first += layers
    pipeline = Pipeline(tuple(parts), tuple(microbatches))
    return Plan(scenario.name, scenario.model.name, "hand", schedule, (pipeline,))


@dataclass(frozen=True)
class Trained:
    """What training leaves."""

    losses: list[float]
    parameters: Mapping[str, torch.Tensor]


def train_in_one_process(
    scenario: Scenario, steps: int, batches: Sequence[int] = (), factors: Sequence[float] = ()
) -> Trained:
    """Train the whole model on whole batches: what every plan must equal.

    ``batches`` has the global batch of each step, ``factors`` those on the learning rate; the scenario's if empty.
    """
    assert scenario.code is not None
    training = scenario.training
    model = load_model(scenario.code, training.seed)
    layers = nn.Sequential(*model.layers)
    optimizer = optimizer_of(training.optimizer, layers)
    mixed = training.precision == "bf16"
    losses, trained = [], 0
    for step in range(steps):
        count = batches[step] if batches else training.global_batch
        inputs, targets = samples_at(model, trained, count, training)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = model.loss(layers(inputs), targets)
        loss.backward()
        if training.clip_norm is not None:
            nn.utils.clip_grad_norm_(layers.parameters(), training.clip_norm)
        for group in optimizer.param_groups:
            progress = training.optimizer.schedule.factor(trained / training.global_batch)
            group["lr"] = training.optimizer.learning_rate * progress * (factors[step] if factors else 1.0)
        optimizer.step()
        trained += count
        losses.append(float(loss.detach()))
    return Trained(losses, {name: value.detach() for name, value in layers.named_parameters()})


def optimizer_of(rule: Optimizer, layers: nn.Module) -> torch.optim.Optimizer:
    parameters, settings = layers.parameters(), {"lr": rule.learning_rate, "weight_decay": rule.weight_decay}
    if rule.name == "adamw":
        return torch.optim.AdamW(parameters, **settings)
    return torch.optim.SGD(parameters, momentum=rule.momentum if rule.name == "momentum" else 0.0, **settings)


def samples_at(model: TrainableModel, first: int, count: int, training: Training) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples one by one from a position on: those of a data set in the order of its epochs' permutations."""
    if not hasattr(model, "select"):
        return model.samples(first, count)
    indices = []
    for position in range(first, first + count):
        epoch, place = divmod(position, model.size)
        keys = np.random.Philox(key=[training.seed, epoch]).random_raw(model.size).tolist()
        indices.append(sorted(range(model.size), key=keys.__getitem__)[place])
    return model.select(torch.tensor(indices))


def regional_batch(
    model: TrainableModel, step: int, scenario: Scenario, region: str, samples: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``samples`` samples of a step of a region that owns data: the next ones of its own part, in order."""
    whole, own = sum(scenario.data.values()), scenario.data[region]
    regions = list(scenario.data)
    before = sum(scenario.data[name] for name in regions[: regions.index(region)])
    positions = range(step * samples, (step + 1) * samples)
    if not hasattr(model, "select"):
        numbers = [position // own * whole + before + position % own for position in positions]
        pairs = [model.samples(number, 1) for number in numbers]
        return torch.cat([inputs for inputs, _ in pairs]), torch.cat([targets for _, targets in pairs])
    first, end = model.size * before // whole, model.size * (before + own) // whole
    indices = []
    for position in positions:
        epoch, place = divmod(position, end - first)
        philox = np.random.Philox(key=[scenario.training.seed, epoch], counter=[0, 0, 0, first])
        keys = philox.random_raw(end - first).tolist()
        indices.append(first + sorted(range(end - first), key=keys.__getitem__)[place])
    return model.select(torch.tensor(indices))


def chain(code: ModelCode = GPT, optimizer: Optimizer | None = None) -> tuple[Scenario, Plan]:
    """Three stages; the middle one has two replicas."""
    scenario = training_scenario(code, 4, optimizer=optimizer)
    layers = len(scenario.model.layers)
    stages = [(2, [1.0]), (2, [1.0, 1.0]), (layers - 4, [1.0])]
    return scenario, hybrid_plan(scenario, "1f1b", [(stages, [4, 4, 4])])


def assert_trained(record: RunRecord, parameters: Path, expected: Trained) -> None:
    """Losses and parameters are those of training that nothing has disturbed."""
    assert record.losses == pytest.approx(expected.losses, rel=1e-6)
    trained = load_file(parameters)
    assert trained.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        torch.testing.assert_close(trained[name], value, rtol=1e-5, atol=1e-6, msg=name)
