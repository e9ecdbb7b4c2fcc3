"""The state of layers before a run's first step: as the model was built, or as a checkpoint has it."""

from pathlib import Path
from typing import Protocol

import torch

from executor.core.job import RunConfig
from executor.recovery.checkpoints import CheckpointFolder
from executor.training.compute import Compute
from planner.adapt.migration import LayerTransfer, state_bytes
from planner.scenario.scenario import Scenario


class FirstState(Protocol):
    """Gives the state of layers before a run's first step."""

    @property
    def step(self) -> int:
        """The first step of the run."""

    def row(self, layer: int) -> torch.Tensor:
        """Return the state of a layer that was never trained here, uint8, one-dimensional."""


class AsBuilt:
    """The model as every rank has built it.

    Args:
        scenario: The scenario of the run.
        compute: Holds the layers.
    """

    step = 0

    def __init__(self, scenario: Scenario, compute: Compute) -> None:
        self._scenario = scenario
        self._compute = compute

    def row(self, layer: int) -> torch.Tensor:
        """Return the state with which a layer was built."""
        return self._compute.layer_state(one_layer(self._scenario, layer))


def first_state(run: RunConfig, scenario: Scenario, compute: Compute, model: tuple[str, ...]) -> FirstState:
    """Return what a run begins with.

    Args:
        run: How the job runs.
        scenario: The scenario of the run.
        compute: Holds the layers.
        model: What the layers' state consists of: executor/recovery/checkpoint_file.py.

    Raises:
        InputError: It begins with a checkpoint that is not whole.
    """
    if not run.first_step:
        return AsBuilt(scenario, compute)
    return CheckpointFolder(Path(run.checkpoints)).of_step(run.first_step, model)


def one_layer(scenario: Scenario, layer: int) -> LayerTransfer:
    """Return a move that stands for a layer where it is."""
    return LayerTransfer("", "", layer, layer + 1, state_bytes(scenario, layer, layer + 1))
