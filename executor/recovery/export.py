"""Exports trained weights of a model of transformers, in the files and with the names that transformers reads."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from executor.recovery.checkpoints import CheckpointFolder
from executor.training.flat_state import model_state
from executor.training.models.loading import load_model
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
    assert scenario.code is not None, "only a model with code has checkpoints"
    with torch.device("meta"):
        layers = load_model(scenario.code, scenario.training.seed).layers
    optimizer = scenario.training.optimizer.name
    found = CheckpointFolder(folder).newest(model_state(layers, optimizer), lambda _: None)
    parameters: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(layers):
        state = found.tensors(index)
        parameters |= {f"{index}.{name}": state[name] for name, _ in layer.named_parameters()}
    return found.step, parameters


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
