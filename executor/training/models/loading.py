"""Loads the user's model from its file, computes the sizes of its layers, and compares them with the profile."""

import math
import os
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import nn

from executor.training.data.order import DataOrder, DivisibleData, EndlessData, FiniteData, SampleData, stored_data
from executor.training.data.sources import open_data
from executor.training.data.tokens import NextTokens
from executor.training.models.precision import boundary_dtype
from executor.training.models.trainable import MEMBERS, TiedModel, TrainableModel, check_members, own_data
from planner.plan.regional_batch import stored_parts
from planner.scenario.profile import ModelProfile
from planner.scenario.scenario import Code, HuggingFaceCode, Scenario, code_to_train
from planner.scenario.training import SavedDataset, TrainingData
from planner.systems.user_code import load_build
from planner.systems.user_code import user_code as code_around
from traces.common.errors import InputError


@dataclass(frozen=True, slots=True)
class SampleShape:
    """Shape (without the batch dimension) and dtype of a layer's output for one sample."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Size of one sample in bytes."""
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Sizes of a layer.

    Attributes:
        changes_inputs: Whether the layer changes its input tensor in place.
        tied_bytes: Bytes of the layer's copy of a parameter that several layers share.
    """

    parameter_bytes: int
    output: SampleShape
    changes_inputs: bool = False
    tied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, the sizes of its layers, and its data.

    Attributes:
        workers: Number of processes in which a rank reads the data ahead; 0 if it reads the data itself.
        rebuild: Builds the model anew with the given layers, while the others take no memory; None if every layer takes
            memory all the time.
    """

    model: TrainableModel
    sizes: tuple[LayerSize, ...]
    data: SampleData
    workers: int = 0
    rebuild: Callable[[Collection[int]], TrainableModel] | None = None

    def first_layers(self, indices: Sequence[int]) -> list[nn.Module]:
        """Return layers before the first step: new ones, or those of the model if all of them take memory anyway."""
        layers = self.model.layers if self.rebuild is None else self.rebuild(indices).layers
        return [layers[index] for index in indices]

    def fill(self, index: int) -> None:
        """Give layer ``index`` memory and its first weights, unless it has them."""
        layer = self.model.layers[index]
        if is_empty(layer):
            (filled,) = self.first_layers([index])
            for name, child in filled.named_children():
                layer.add_module(name, child)


def is_empty(layer: nn.Module) -> bool:
    """Return whether a layer has no memory for its parameters, since it is on torch's meta device."""
    return any(parameter.is_meta for parameter in layer.parameters())


def load_model(code: Code, seed: int, chosen: Collection[int] | None = None) -> TrainableModel:
    """Return the model of a configuration of transformers, or that the file's function ``build`` returns.

    Its parameters depend on the seed alone.

    Args:
        code: The model's file, or its configuration.
        seed: Seed of the parameters.
        chosen: The layers that are needed; None for all. A model of transformers has the others on torch's meta device,
            without memory; ``build`` makes all layers.

    Raises:
        InputError: The file cannot be run, or has no ``build`` that takes the arguments and returns a model.
    """
    if isinstance(code, HuggingFaceCode):
        return _builder(code, seed)(chosen)
    build = load_build(code.path, "model", f"an object with {MEMBERS}", code.arguments)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model: TrainableModel = build()
    check_members(model, str(code.source))
    for module in nn.ModuleList(each for each in model.layers if isinstance(each, nn.Module)).modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            # Sums of gradients over replicas are dense; what is trained is the same.
            module.sparse = False
    return model


def load_transformers(family: str) -> None:
    """Load the package ``transformers``, and its module with the models of a family, which takes as long again.

    Raises:
        InputError: It is not installed.
    """
    if find_spec("transformers") is None:
        raise InputError(
            "the package 'transformers' is not installed",
            where="model.huggingface",
            valid="pip install 'ropebridge[hf]', or run with '--compute paced'",
        )
    from executor.training.models.huggingface import load_family

    load_family(family)


def _builder(code: HuggingFaceCode, seed: int) -> Callable[[Collection[int] | None], TrainableModel]:
    """Return a function that builds the model with some layers, as `load_model` does."""
    load_transformers(code.config["model_type"])
    from executor.training.models.huggingface import ModelBuilder

    builder = ModelBuilder(code, seed)

    def build(chosen: Collection[int] | None) -> TrainableModel:
        with user_code(code, "transformers cannot build the model"):
            return builder.build(chosen)

    return build


def check_model(scenario: Scenario) -> LoadedModel:
    """Return a scenario's model, as `load_for_checks` does, if it passes `check_loaded`.

    Raises:
        InputError: As there, or the scenario has no code.
    """
    code, training = code_to_train(scenario), scenario.training
    loaded = load_for_checks(code, training.seed, training.precision, training.data)
    check_loaded(loaded, code, scenario)
    return loaded


def check_loaded(loaded: LoadedModel, code: Code, scenario: Scenario) -> None:
    """Check that a model can be trained and matches its profile.

    Raises:
        InputError: A layer differs from the profile, the loss is not a single number, or the data cannot be divided
            among the regions that own them.
    """
    compare_sizes(scenario.model, loaded.sizes, str(code.source))
    _check_loss(loaded, code, scenario.training.seed)
    for stored in stored_parts(scenario).values():
        stored_data(loaded.data, stored, scenario.training.seed)


def load_for_checks(code: Code, seed: int, precision: str = "fp32", named: TrainingData | None = None) -> LoadedModel:
    """Return the same as `load_with_sizes`, but the layers of a configuration of transformers without memory.

    Such a model may be larger than the memory of the machine that starts a run. Its samples are real.
    """
    if not isinstance(code, HuggingFaceCode):
        return load_with_sizes(code, seed, precision, named)
    with torch.device("meta"):
        model = load_model(code, seed)
    return _with_sizes(model, code, seed, precision, named)


def load_with_sizes(
    code: Code,
    seed: int,
    precision: str = "fp32",
    named: TrainingData | None = None,
    chosen: Collection[int] | None = None,
) -> LoadedModel:
    """Return the model, its data, and the sizes of its layers, computed with a copy on torch's meta device.

    Args:
        code: The model's file, or its configuration.
        seed: Seed of the initial parameters and of the order of the data.
        precision: One of `planner.scenario.training.PRECISIONS`; outputs between layers have its number format.
        named: The data that the scenario names; None for the model's own.
        chosen: The layers that are needed; see `load_model`.

    Raises:
        InputError: The model cannot be built, or cannot be split between its layers, or the data cannot be read.
    """
    if not isinstance(code, HuggingFaceCode):
        return _with_sizes(load_model(code, seed), code, seed, precision, named)
    build = _builder(code, seed)
    return replace(_with_sizes(build(chosen), code, seed, precision, named), rebuild=build)


def load_meta_device() -> None:
    """Load the modules with which torch computes shapes on its device ``meta``, some 800 of its compiler.

    Loading them makes the folder in which torch keeps compiled code; it is removed again while it is empty.
    """
    torch.nn.functional.gelu(torch.empty(1, device="meta"))
    with suppress(KeyError, OSError):
        Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rmdir()


def _with_sizes(
    loaded: TrainableModel, code: Code, seed: int, precision: str, named: TrainingData | None
) -> LoadedModel:
    data: SampleData = own_data(loaded, str(code.source)) if named is None else _named_data(named, code, seed)
    load_meta_device()
    with user_code(code, f"'{'select' if isinstance(data, FiniteData) else 'samples'}' fails"):
        inputs, _ = DataOrder(data, seed).samples(0, 1)
        outputs = inputs.to("meta")
    with torch.device("meta"):
        model = load_model(code, seed)
    _check_parameters(model, str(code.source))
    tied = {index: layer.get_parameter(name).nbytes for index, layer, name in _tied(model)}
    sizes = []
    for index, layer in enumerate(model.layers):
        entering, version = outputs, outputs._version
        with user_code(code, f"layer {index} cannot take the output of the layer before it"), torch.no_grad():
            # While it trains, batch norm takes no single sample.
            outputs = layer.eval()(outputs)
        if not isinstance(outputs, torch.Tensor) or outputs.ndim == 0 or outputs.shape[0] != 1:
            raise InputError(
                f"layer {index} returns {_described(outputs)} for one sample",
                where=str(code.source),
                valid="a layer takes one tensor and returns one, with the samples along its first dimension",
            )
        if index < len(model.layers) - 1 and outputs.dtype != torch.float32:
            raise InputError(
                f"layer {index} returns {outputs.dtype}",
                where=str(code.source),
                valid="outputs of all layers but the last must be torch.float32",
            )
        parameter_bytes = sum(parameter.nbytes for parameter in layer.parameters())
        dtype = outputs.dtype if index == len(model.layers) - 1 else boundary_dtype(precision)
        output = SampleShape(tuple(outputs.shape[1:]), dtype)
        changes = entering._version > version or _changes_while_training(layer, entering)
        sizes.append(LayerSize(parameter_bytes, output, changes_inputs=changes, tied_bytes=tied.get(index, 0)))
    return LoadedModel(loaded, tuple(sizes), data, 0 if named is None else named.workers)


def _changes_while_training(layer: nn.Module, entering: torch.Tensor) -> bool:
    """Return whether a layer changes its input in place while it trains, as dropout may; False if this is not known."""
    # Batch norm needs two samples.
    several = torch.cat([entering.detach(), entering.detach()])
    version = several._version
    with suppress(Exception), torch.no_grad():
        layer.train()(several)
    return several._version > version


def _named_data(named: TrainingData, code: Code, seed: int) -> EndlessData:
    """Return the data that a scenario names; transformers takes the tokens of a sample as targets, and shifts them."""
    data, source = open_data(named, seed), named.source
    are_tokens = isinstance(source, SavedDataset) and source.inputs == source.targets
    if are_tokens and isinstance(code, HuggingFaceCode):
        assert isinstance(data, DivisibleData), "a saved data set has a size"
        return NextTokens(data)
    return data


def _tied(model: TrainableModel) -> Iterator[tuple[int, nn.Module, str]]:
    """Yield each layer with a copy of a shared parameter: its index, the layer, and the parameter's name."""
    for index, name in model.tied if isinstance(model, TiedModel) else ():
        yield index, model.layers[index], name


def _check_loss(loaded: LoadedModel, code: Code, seed: int) -> None:
    """Raise `InputError` if the loss of one sample, for an output of zeros, is not a single number.

    Unlike the layers, the loss is computed with real tensors, since it may depend on values.
    """
    _, targets = DataOrder(loaded.data, seed).samples(0, 1)
    output = loaded.sizes[-1].output
    with user_code(code, "'loss' fails for one sample"), torch.no_grad():
        loss = loaded.model.loss(torch.zeros(1, *output.sizes, dtype=output.dtype), targets)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise InputError(
            f"'loss' returns {_described(loss)} for one sample",
            where=str(code.source),
            valid="a tensor with one number, the mean over the samples",
        )


def _check_parameters(model: TrainableModel, where: str) -> None:
    """Raise `InputError` for a parameter that is not float32, or that two layers share: their copies would differ."""
    owners: dict[int, int] = {}
    for index, layer in enumerate(model.layers):
        for name, parameter in layer.named_parameters():
            if parameter.dtype != torch.float32:
                raise InputError(
                    f"parameter '{name}' of layer {index} is {parameter.dtype}",
                    where=where,
                    valid="parameters must be torch.float32 in every precision",
                )
            owner = owners.setdefault(id(parameter), index)
            if owner != index:
                raise InputError(
                    f"layers {owner} and {index} share the parameter '{name}'",
                    where=where,
                    valid="layers may stand on different devices: give each parameters of its own",
                )


def _described(outputs: object) -> str:
    return f"shape {list(outputs.shape)}" if isinstance(outputs, torch.Tensor) else f"a {type(outputs).__name__}"


def user_code(code: Code, failure: str) -> AbstractContextManager[None]:
    """Return a context in which any error of the model's code becomes an `InputError` that begins with ``failure``."""
    return code_around(code.source, failure, "correct the model, or 'arguments' in the scenario")


def compare_sizes(profile: ModelProfile, sizes: Sequence[LayerSize], where: str) -> None:
    """Raise `InputError` for the first layer whose sizes differ from those of the profile that plans are made from."""
    if len(sizes) != len(profile.layers):
        raise InputError(
            f"the model has {len(sizes)} layers",
            where=where,
            valid=f"its profile '{profile.name}' has {len(profile.layers)}: correct the profile or 'arguments'",
        )
    for index, (layer, size) in enumerate(zip(profile.layers, sizes, strict=True)):
        pairs = [
            ("bytes of parameters", size.parameter_bytes, layer.parameter_bytes),
            ("bytes of tied parameters", size.tied_bytes, layer.tied_bytes),
        ]
        # The profile has no output size for the last layer, whose output is not sent.
        if index < len(sizes) - 1:
            pairs.append(("bytes of output for one sample", size.output.size_bytes, layer.output_bytes))
        for what, found, expected in pairs:
            if found != expected:
                raise InputError(
                    f"layer {index} has {found} {what}",
                    where=where,
                    valid=f"its profile '{layer.name}' says {expected}: correct the profile or 'arguments'",
                )
