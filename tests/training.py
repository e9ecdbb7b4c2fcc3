"""Scenarios with real models for tests, and the oracle: training in one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from executor.model import load_model, load_with_sizes
from planner.cluster import Cluster, Device, Link
from planner.plan import Pipeline, Plan, Replica, Stage
from planner.profile import LayerProfile, ModelProfile, TimeTable
from planner.scenario import ModelCode, Optimizer, Scenario, Training

MODELS = Path(__file__).parents[1] / "experiments" / "models"
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


@dataclass(frozen=True)
class Trained:
    """What training leaves."""

    losses: list[float]
    parameters: Mapping[str, torch.Tensor]


def train_in_one_process(scenario: Scenario, steps: int) -> Trained:
    """Train the whole model on whole batches: what every plan must equal."""
    assert scenario.code is not None
    training = scenario.training
    model = load_model(scenario.code, training.seed)
    layers = nn.Sequential(*model.layers)
    rule = training.optimizer
    optimizer: torch.optim.Optimizer
    if rule.name == "adamw":
        optimizer = torch.optim.AdamW(layers.parameters(), lr=rule.learning_rate, weight_decay=rule.weight_decay)
    else:
        momentum = rule.momentum if rule.name == "momentum" else 0.0
        optimizer = torch.optim.SGD(layers.parameters(), lr=rule.learning_rate, momentum=momentum)
    losses = []
    for step in range(steps):
        inputs, targets = model.samples(step * training.global_batch, training.global_batch)
        optimizer.zero_grad()
        loss = model.loss(layers(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(losses, {name: value.detach() for name, value in layers.named_parameters()})
