"""Exports trained weights of a model of transformers, in the files and with the names that transformers reads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from executor.recovery.checkpoints import Checkpoint, CheckpointFolder
from executor.training.flat_state import model_state
from executor.training.models.loading import load_model
from planner.files.plan import parse_plan
from planner.scenario.scenario import HuggingFaceCode, Scenario
from traces.common.errors import InputError


def read_parameters(path: Path) -> dict[str, torch.Tensor]:
    """Return the parameters that a run with real compute has written, by the names ``LAYER.PARAMETER``.

    Raises:
        InputError: There is no such file, or it cannot be read.
    """
    try:
        return load_file(path)
    except FileNotFoundError:
        raise InputError(
            "there are no parameters",
            where=str(path),
            valid="name the folder of a finished run with real compute, or give '--checkpoint'",
        ) from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"the file cannot be read: {error}", where=str(path), valid="run again") from None


def checkpoint_parameters(folder: Path, scenario: Scenario) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the step of the newest complete checkpoint in a folder, and its parameters.

    Raises:
        InputError: No checkpoint is complete, or the newest is of another model.
    """
    return newest_parameters(folder, replace(scenario, code=_code(scenario)))


def newest_parameters(folder: Path, scenario: Scenario) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the same of any model; raises as `checkpoint_parameters` does, but not for models of other kinds."""
    layers, state = _layers(scenario)
    found = CheckpointFolder(folder).newest(state, lambda _: None)
    return found.step, StoredParameters.of(found, layers).mean


def parameters_by_step(folder: Path, scenario: Scenario) -> "Iterator[StoredParameters]":
    """Yield the parameters in each checkpoint of a run that has ended, in the order of steps."""
    layers, state = _layers(scenario)
    checkpoints = CheckpointFolder(folder)
    return (StoredParameters.of(checkpoints.of_step(step, state), layers) for step in checkpoints.steps)


def _layers(scenario: Scenario) -> tuple[Sequence[nn.Module], tuple[str, ...]]:
    """Return the layers of a scenario's model without memory, and what the state of each consists of."""
    assert scenario.code is not None, "only a model with code has checkpoints"
    with torch.device("meta"):
        layers = load_model(scenario.code, scenario.training.seed).layers
    return layers, model_state(layers, scenario.training.optimizer.name)


@dataclass(frozen=True, eq=False, slots=True)
class StoredParameters:
    """The parameters in a checkpoint, by the names ``LAYER.PARAMETER``.

    Attributes:
        step: The first step after the checkpoint.
        own: The parameters of each pipeline that trains separately; otherwise those that all pipelines have, once.
        samples: The samples of a step of each of them.
    """

    step: int
    own: Sequence[dict[str, torch.Tensor]]
    samples: Sequence[int]

    @classmethod
    def of(cls, found: Checkpoint, layers: Sequence[nn.Module]) -> "StoredParameters":
        """Read them; ``layers`` are those of the model."""
        pipelines, own = parse_plan(found.plan).pipelines, found.with_state
        samples = [pipelines[index].samples for index, _ in own]
        return cls(found.step, [_parameters(each, layers) for _, each in own], samples)

    @property
    def mean(self) -> dict[str, torch.Tensor]:
        """The mean of the pipelines' parameters by their samples, which of equal ones is exact."""
        first, *others = self.own
        if not others:
            return first
        weights = torch.tensor(self.samples, dtype=torch.float64)
        mean = {}
        for name, tensor in first.items():
            same = torch.stack([one[name] for one in self.own]).to(torch.float64)
            mean[name] = (torch.tensordot(weights, same, dims=1) / weights.sum()).to(tensor.dtype)
        return mean


def _parameters(checkpoint: Checkpoint, layers: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    parameters: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(layers):
        state = checkpoint.tensors(index)
        parameters |= {f"{index}.{name}": state[name] for name, _ in layer.named_parameters()}
    return parameters


def export_model(scenario: Scenario, parameters: Mapping[str, torch.Tensor], folder: Path) -> list[Path]:
    """Write ``config.json`` and safetensors files, and return their paths.

    Raises:
        InputError: The model is not one of transformers, or the parameters are of another model.
    """
    code = _code(scenario)
    with torch.device("meta"):
        model = load_model(code, scenario.training.seed)
    from executor.training.models.huggingface import TransformersModel, save_model

    assert isinstance(model, TransformersModel)
    expected = {f"{index}.{name}" for index, layer in enumerate(model.layers) for name, _ in layer.named_parameters()}
    if parameters.keys() != expected:
        raise InputError(
            f"{len(parameters.keys() ^ expected)} parameters differ from those of the model",
            where=str(code.source),
            valid="give the run of this scenario",
        )
    save_model(code, model.original(parameters), folder)
    return sorted(folder.iterdir())


def _code(scenario: Scenario) -> HuggingFaceCode:
    """Return the model without its first weights, whose files may be gone."""
    if not isinstance(scenario.code, HuggingFaceCode):
        raise InputError(
            f"model '{scenario.model.name}' is not one of transformers",
            where="model.huggingface",
            valid="only models that a scenario names as 'huggingface' can be exported; the run's "
            "parameters.safetensors has the parameters of all others, by the names LAYER.PARAMETER",
        )
    return replace(scenario.code, path=None)
