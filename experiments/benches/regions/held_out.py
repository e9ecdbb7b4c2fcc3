"""The loss on held-out text of the language model of characters: at the end of a run, and on the way there."""

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
from executor.training.models.loading import load_model
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError

Parameters = Mapping[str, torch.Tensor]

# How often a bench looks for a new checkpoint, seconds.
_EVERY_S = 0.2


def held_out_loss(scenario: Scenario, parameters: Parameters, every: int = 1) -> float:
    """Return the loss of a scenario's model with these parameters on every ``every``-th held-out sequence."""
    assert scenario.code is not None, "the model has text"
    model = load_model(scenario.code, 0)
    layers = torch.nn.Sequential(*model.layers)
    layers.load_state_dict(dict(parameters))
    inputs, targets = model.held_out()  # type: ignore[attr-defined]
    with torch.no_grad():
        return float(model.loss(layers(inputs[::every]), targets[::every]))


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The parameters that a run would have written if it had ended after ``step`` steps, at ``time_s``."""

    scenario: Scenario
    step: int
    time_s: float
    parameters: Parameters

    @cached_property
    def loss(self) -> float:
        """The loss on a quarter of the held-out text, computed when it is first asked for."""
        return held_out_loss(self.scenario, self.parameters, every=4)


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
