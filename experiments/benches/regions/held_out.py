"""Losses of the language model of characters on text that no step has had: at the end of a run, and on the way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch

from executor.training.models.loading import load_model
from planner.scenario.scenario import Scenario


def held_out_loss(scenario: Scenario, parameters: Mapping[str, torch.Tensor]) -> float:
    """Return the loss of a scenario's model with these parameters on the text that is held out of training."""
    assert scenario.code is not None, "the model has text"
    model = load_model(scenario.code, 0)
    inputs, targets = model.held_out()  # type: ignore[attr-defined]
    layers = torch.nn.Sequential(*model.layers)
    layers.load_state_dict(dict(parameters))
    with torch.no_grad():
        return float(model.loss(layers(inputs), targets))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The loss of the parameters that a run would have written if it had ended after ``step`` steps, at ``time_s``."""

    step: int
    time_s: float
    loss: float


def time_to_loss(snapshots: Sequence[Snapshot], loss: float) -> float:
    """Return the time at which a run reaches a loss, seconds, linear between snapshots; infinite if it never does."""
    before: Snapshot | None = None
    for each in snapshots:
        if each.loss <= loss:
            if before is None:
                return each.time_s
            share = (before.loss - loss) / (before.loss - each.loss)
            return before.time_s + share * (each.time_s - before.time_s)
        before = each
    return inf
