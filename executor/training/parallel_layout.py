"""Checks, before a run, that a model's layers can be sharded over the tensor-parallel groups of a plan."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.autograd.graph import Node

from executor.training.data.order import DataOrder
from executor.training.models.loading import LoadedModel, load_model, user_code
from executor.training.models.trainable import COLUMN, ROW, SUMMED, VOCABULARY, ShardedScores, TensorParallelModel
from executor.training.split_backward import is_modified
from executor.training.tensor_parallel import parameter_parts, shard_layer
from planner.plan.plan import Plan
from planner.scenario.scenario import Code, Scenario
from traces.common.errors import InputError


class TracingGroup:
    """Stands in for the first device of a group of ``degree`` devices; records autograd's graph of sharded layers."""

    def __init__(self, degree: int) -> None:
        self._degree = degree
        self._totals: list[Node] = []

    @property
    def degree(self) -> int:
        """Number of devices."""
        return self._degree

    def shard(self, full: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return the first part of a tensor, split along a dimension."""
        return full.chunk(self._degree, dimension)[0]

    def enter(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs detached, where a real group would sum the gradients of all devices."""
        return inputs.detach().requires_grad_()

    def total(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs unchanged, and record the graph by which they were computed."""
        if outputs.grad_fn is not None:
            self._totals.append(outputs.grad_fn)
        return outputs

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values unchanged."""
        return values.detach()

    def partial_leaves(self) -> Iterator[torch.Tensor]:
        """Yield the tensors between `enter` and `total` that get a gradient from this device only.

        In a correct layout all of them are shards. Computations that autograd's graph does not contain, as in reentrant
        checkpoints, are not found.
        """
        seen, waiting = set[Node](), list(self._totals)
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            # Only nodes that accumulate the gradient of a leaf tensor have this attribute.
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                yield leaf
            waiting += [before for before, _ in node.next_functions if before is not None]


def check_layouts(scenario: Scenario, plan: Plan, loaded: LoadedModel) -> None:
    """Check the layout of each layer that a plan shards over a tensor-parallel group.

    Args:
        scenario: The scenario, whose model has code.
        plan: The plan, whose sharded layers are checked.
        loaded: The model as loaded, for the sizes of its layers and its data.

    Raises:
        InputError: The model has no layout for a layer, or one that cannot be computed with this number of devices or
            would give wrong gradients, or whose shards have other sizes than in the profile.
    """
    sharded = {
        (replica.tensor_parallel, layer)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for replica in stage.replicas
        for layer in stage.layers
        if replica.tensor_parallel > 1
    }
    code, seed = scenario.code, scenario.training.seed
    if not sharded:
        return
    assert code is not None, "the model was checked"
    for degree in sorted({degree for degree, _ in sharded}):
        with torch.device("meta"):
            model = load_model(code, seed)
        if not isinstance(model, TensorParallelModel):
            raise InputError(
                "the model has no parallel layout",
                where=str(code.source),
                valid=f"tensor parallelism over {degree} devices needs its method 'parallel_layout'; or make a plan "
                "without 'partners'",
            )
        for index in sorted(layer for each, layer in sharded if each == degree):
            where = f"{code.source}: parallel_layout({index})"
            with user_code(code, f"'parallel_layout' fails for layer {index}"):
                layout = dict(model.parallel_layout(index))
            _check_names(model.layers[index], layout, degree, where)
            group = TracingGroup(degree)
            shard_layer(model.layers[index], layout, group)
            inputs = _check_forward(model.layers[index], index, loaded, code, seed, degree)
            _check_gradients(model.layers[index], group, inputs, where)
            _check_size(model.layers[index], index, scenario, degree, where)


def _check_names(layer: nn.Module, layout: Mapping[str, str], degree: int, where: str) -> None:
    modules = dict(layer.named_modules())
    for name, how in layout.items():
        module = modules.get(name) if name else None
        if module is None:
            linear = [each for each, found in modules.items() if each and type(found) is nn.Linear]
            raise InputError(
                f"the layer has no submodule '{name}'",
                where=where,
                valid=f"name linear submodules of the layer: {', '.join(linear) or 'it has none'}",
            )
        if how not in (COLUMN, ROW, VOCABULARY, SUMMED):
            valid = f"'{COLUMN}', '{ROW}', '{VOCABULARY}' or '{SUMMED}'"
            raise InputError(f"submodule '{name}' has the value {how!r}", where=where, valid=valid)
        if how != SUMMED and _has_more_than_weights(module):
            valid = "remove its hooks, 'max_norm' and 'scale_grad_by_freq', which its parts would not have"
            raise InputError(f"submodule '{name}' cannot be sharded as it is", where=where, valid=valid)
        if how == SUMMED or (how == VOCABULARY and type(module) is nn.Embedding):
            _check_aliases(layer, name, module, where)
            continue
        if type(module) is not nn.Linear or {"weight", "bias"} != set(module._parameters):
            raise InputError(
                f"submodule '{name}' is a {type(module).__name__}",
                where=where,
                valid="only torch.nn.Linear modules can be sharded",
            )
        width = module.out_features if how == COLUMN else module.in_features
        if width % degree and how != VOCABULARY:
            raise InputError(
                f"submodule '{name}' cannot be sharded by {how} into {degree} equal parts",
                where=where,
                valid=f"its {'outputs' if how == COLUMN else 'inputs'}, {width}, must be a multiple of {degree}",
            )
        _check_aliases(layer, name, module, where)


def _has_more_than_weights(module: nn.Module) -> bool:
    if is_modified(module):
        return True
    if not isinstance(module, nn.Embedding):
        return False
    return module.max_norm is not None or module.scale_grad_by_freq


def _check_aliases(layer: nn.Module, name: str, module: nn.Module, where: str) -> None:
    """Raise `InputError` for a parameter that another submodule uses too, where it would stay unsharded."""
    own = {id(parameter) for parameter in module.parameters()}
    for other, parameter in layer.named_parameters(remove_duplicate=False):
        if id(parameter) in own and other.rpartition(".")[0] != name:
            raise InputError(
                f"submodule '{name}' uses the same parameter as '{other}'",
                where=where,
                valid="only submodules that share no parameter can be sharded",
            )


def _check_forward(
    layer: nn.Module, index: int, loaded: LoadedModel, code: Code, seed: int, degree: int
) -> torch.Tensor:
    """Raise `InputError` if a sharded layer fails or returns another shape than the unsharded layer; return its inputs.

    Another shape results, for example, from parts that are not summed.
    """
    if index:
        # Between layers numbers are float32; in half precision they are converted on the way.
        sizes = loaded.sizes[index - 1].output.sizes
        inputs = torch.empty((1, *sizes), dtype=torch.float32, device="meta", requires_grad=True)
    else:
        inputs = DataOrder(loaded.data, seed).samples(0, 1)[0].to("meta")
    failure = f"layer {index} cannot be computed in {degree} parts by its parallel layout"
    with user_code(code, failure):
        # The layer may change its inputs in place.
        outputs = layer(inputs.clone())
    expected = [1, *loaded.sizes[index].output.sizes]
    if index == len(loaded.sizes) - 1 and any(isinstance(each, ShardedScores) for each in layer.modules()):
        expected[-1] //= degree
    if list(outputs.shape) != expected:
        raise InputError(
            f"{failure}: it returns shape {list(outputs.shape)}",
            where=str(code.source),
            valid=f"shape {expected}; every '{COLUMN}' submodule needs a '{ROW}' submodule after it in the same layer",
        )
    return inputs


def _check_gradients(layer: nn.Module, group: TracingGroup, inputs: torch.Tensor, where: str) -> None:
    """Raise `InputError` if replicated parameters or inputs are used on a part, so that their gradients are partial."""
    replicated: dict[torch.Tensor, str] = {inputs: "input"}
    unsharded = (part for part in parameter_parts(layer) if part.dimension is None)
    replicated |= {part.parameter: f"parameter '{part.name}'" for part in unsharded}
    for leaf in group.partial_leaves():
        if leaf in replicated:
            raise InputError(
                f"the layer's {replicated[leaf]} is used on a part, between '{COLUMN}' and '{ROW}'",
                where=where,
                valid=f"use it before a '{COLUMN}' or after a '{ROW}' submodule, freeze it, or do not shard the layer: "
                "its gradient would be that of one device's part only",
            )


def _check_size(layer: nn.Module, index: int, scenario: Scenario, degree: int, where: str) -> None:
    found = sum(math.prod(parameter.shape) * parameter.itemsize for parameter in layer.parameters())
    profile = scenario.model.at_degree(degree).layers[index]
    if found != profile.parameter_bytes:
        raise InputError(
            f"each of {degree} devices holds {found} bytes of parameters",
            where=where,
            valid=f"the profile '{profile.name}' of a shard has {profile.parameter_bytes}; correct profile or model",
        )
