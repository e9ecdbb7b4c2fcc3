"""The user's model: loaded from its file, measured without memory, held against the profile."""

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from planner.profile import ModelProfile
from planner.scenario import ModelCode, Scenario
from traces.errors import InputError


class TrainableModel(Protocol):
    """What a model file's ``build`` returns: a chain of layers, a loss, and data."""

    layers: Sequence[nn.Module]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of the last layer's outputs: a scalar, the mean over the samples."""

    def samples(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of samples ``first`` to ``first + count - 1``; each depends on its index only."""


@dataclass(frozen=True, slots=True)
class SampleShape:
    """What a layer puts out for one sample.

    Attributes:
        sizes: Shape without the batch dimension.
        dtype: Of the numbers.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes for one sample."""
        return math.prod(self.sizes) * self.dtype.itemsize


def load_model(code: ModelCode, seed: int) -> TrainableModel:
    """Return the model, with parameters that depend on the seed alone.

    Raises:
        InputError: The file cannot be run, or has no ``build`` that takes the arguments.
    """
    build = _load_build(code.path)
    try:
        inspect.signature(build).bind(**code.arguments)
    except TypeError as error:
        raise InputError(
            f"'build' does not take these arguments: {error}",
            where=str(code.path),
            valid=f"its signature is build{inspect.signature(build)}; see 'arguments' in the scenario",
        ) from None
    torch.manual_seed(seed)
    model: TrainableModel = build(**code.arguments)
    for name in ("layers", "loss", "samples"):
        if not hasattr(model, name):
            raise InputError(
                f"what 'build' returns has no '{name}'",
                where=str(code.path),
                valid="return an object with 'layers', 'loss' and 'samples'",
            )
    return model


@dataclass(frozen=True, slots=True)
class LayerSize:
    """What a layer holds and puts out.

    Attributes:
        parameter_bytes: Of all its parameters.
        output: For one sample.
    """

    parameter_bytes: int
    output: SampleShape


def check_model(scenario: Scenario) -> None:
    """Refuse a scenario whose model code cannot be trained or does not match its profile.

    Raises:
        InputError: Says which layer differs, by how much, and what the profile says.
    """
    if scenario.code is None:
        raise InputError(
            f"model '{scenario.model.name}' has no code to train",
            where="model.code",
            valid="add 'code: model.py' to the scenario, or run with '--compute paced'",
        )
    sizes = layer_sizes(scenario.code, scenario.training.seed)
    _compare(scenario.model, sizes, str(scenario.code.path))


def layer_sizes(code: ModelCode, seed: int) -> tuple[LayerSize, ...]:
    """Return the sizes of every layer, from a copy of the model without memory.

    Raises:
        InputError: The model cannot be built, or a layer does not take what the one before it puts out.
    """
    inputs, _ = load_model(code, seed).samples(0, 1)
    with torch.device("meta"):
        model = load_model(code, seed)
    sizes = []
    outputs = inputs.to("meta")
    for index, layer in enumerate(model.layers):
        try:
            with torch.no_grad():
                outputs = layer(outputs)
        except Exception as error:
            raise InputError(
                f"layer {index} cannot take the output of the layer before it: {error}",
                where=str(code.path),
                valid="each layer takes one tensor and returns one, samples first",
            ) from error
        parameter_bytes = sum(parameter.nbytes for parameter in layer.parameters())
        sizes.append(LayerSize(parameter_bytes, SampleShape(tuple(outputs.shape[1:]), outputs.dtype)))
    return tuple(sizes)


def _compare(profile: ModelProfile, sizes: Sequence[LayerSize], where: str) -> None:
    if len(sizes) != len(profile.layers):
        raise InputError(
            f"the model has {len(sizes)} layers",
            where=where,
            valid=f"its profile '{profile.name}' has {len(profile.layers)}: correct the profile or 'arguments'",
        )
    for index, (layer, size) in enumerate(zip(profile.layers, sizes, strict=True)):
        pairs = [("bytes of parameters", size.parameter_bytes, layer.parameter_bytes)]
        # The last layer's output goes into the loss and crosses no link.
        if index < len(sizes) - 1:
            pairs.append(("bytes of output for one sample", size.output.size_bytes, layer.output_bytes))
        for what, found, expected in pairs:
            if found != expected:
                raise InputError(
                    f"layer {index} has {found} {what}",
                    where=where,
                    valid=f"its profile '{layer.name}' says {expected}: correct the profile or 'arguments'",
                )


def _load_build(path: Path) -> Callable[..., Any]:
    """The function ``build`` of a Python file; its name in sys.modules cannot clash with anything installed."""
    name = f"ropebridge_user_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError("this is not a Python file", where=str(path), valid="name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(
            f"the model file fails: {type(error).__name__}: {error}",
            where=str(path),
            valid="it must run on import",
        ) from error
    if not callable(getattr(module, "build", None)):
        raise InputError(
            "the model file has no function 'build'",
            where=str(path),
            valid="define build(**arguments) that returns an object with 'layers', 'loss' and 'samples'",
        )
    build: Callable[..., Any] = module.build
    return build
