"""Losses of the language model of characters on text that no step has had: at the end of a run, and on the way."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from threading import Event, Thread

import torch

from executor.recovery.checkpoints import CheckpointFolder
from executor.recovery.export import newest_parameters
from executor.training.data.order import DataOrder
from executor.training.models.loading import load_model
from executor.training.models.trainable import TrainableModel, own_data
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError

Parameters = Mapping[str, torch.Tensor]

# The first of the samples of a snapshot's loss, far beyond those of any run here, and their number.
_NEVER_DRAWN, _SAMPLES = 10**9, 256

# How often a bench looks for a new checkpoint, seconds.
_EVERY_S = 0.2


def held_out_loss(scenario: Scenario, parameters: Parameters) -> float:
    """Return the loss of a scenario's model with these parameters on the text that is held out of training."""
    assert scenario.code is not None, "the model has text"
    model = load_model(scenario.code, 0)
    return _loss(model, parameters, *model.held_out())  # type: ignore[attr-defined]


def _loss(model: TrainableModel, parameters: Parameters, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    layers = torch.nn.Sequential(*model.layers)
    layers.load_state_dict(dict(parameters))
    with torch.no_grad():
        return float(model.loss(layers(inputs), targets))


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The parameters that a run would have written if it had ended after ``step`` steps, at ``time_s``."""

    scenario: Scenario
    step: int
    time_s: float
    parameters: Parameters

    @cached_property
    def loss(self) -> float:
        """The loss on samples that no step of a run has, computed when it is first asked for.

        They are drawn like those of training, whose loss plans to a loss count with.
        """
        assert self.scenario.code is not None, "the model has text"
        model = load_model(self.scenario.code, 0)
        return _loss(model, self.parameters, *DataOrder(own_data(model), 0).samples(_NEVER_DRAWN, _SAMPLES))


@contextmanager
def kept_checkpoints(scenario: Scenario, folder: Path) -> Iterator[dict[int, Parameters]]:
    """Yield a dictionary into which a thread reads the parameters of each checkpoint of a run, by step.

    A run keeps only its last checkpoints; their losses are computed after the run, which they would slow down.
    """
    kept: dict[int, Parameters] = {}
    ended = Event()

    def read() -> None:
        while not ended.wait(_EVERY_S):
            _read_newest(scenario, folder, kept)

    reader = Thread(target=read, name="checkpoints of the bench")
    reader.start()
    try:
        yield kept
    finally:
        ended.set()
        reader.join()
    _read_newest(scenario, folder, kept)


def _read_newest(scenario: Scenario, folder: Path, kept: dict[int, Parameters]) -> None:
    newest = CheckpointFolder(folder).newest_step()
    if newest is None or newest in kept:
        return
    # The files of some pipelines may not be there yet.
    with suppress(InputError):
        step, parameters = newest_parameters(folder, scenario)
        kept[step] = parameters


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
