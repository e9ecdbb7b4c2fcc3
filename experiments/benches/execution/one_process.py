"""Training in one process on whole batches: what training through any plan must equal."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from executor.training.models.loading import load_model
from executor.training.models.trainable import DataOrder
from planner.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Trained:
    """What training leaves.

    Attributes:
        losses: Of each step, without unit.
        parameters: By name, on the CPU.
    """

    losses: tuple[float, ...]
    parameters: Mapping[str, torch.Tensor]


def train_in_one_process(scenario: Scenario, steps: int, device: torch.device) -> Trained:
    """Train a scenario's model in float32 by stochastic gradient descent with momentum, as torch's own loop does."""
    training = scenario.training
    assert scenario.code is not None, "there is something to train"
    assert training.optimizer.name == "momentum"
    model = load_model(scenario.code, training.seed)
    layers = nn.Sequential(*model.layers).to(device)
    rule = training.optimizer
    optimizer = torch.optim.SGD(layers.parameters(), lr=rule.learning_rate, momentum=rule.momentum)
    data = DataOrder(model, training.global_batch, training.seed)
    losses = []
    for step in range(steps):
        inputs, targets = data.samples(step, 0, training.global_batch)
        optimizer.zero_grad()
        loss = model.loss(layers(inputs.to(device)), targets.to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(tuple(losses), {name: value.detach().cpu() for name, value in layers.named_parameters()})
