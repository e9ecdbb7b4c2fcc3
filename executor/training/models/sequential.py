"""Splits a module into a list of layers, for models that were not written as such a list.

The class of a model file can use it with torchvision, for example:
``self.layers = layers_of(torchvision.models.resnet18(), torch.zeros(2, 3, 224, 224))``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from traces.common.errors import InputError

_ADVICE = "write 'layers' by hand, a list of modules of which each takes what the one before it returns"
_TOLERANCE = 1e-5


class _Tracer(fx.Tracer):
    """Traces the module and each `torch.nn.Sequential` in it; other submodules are not split."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, nn.Sequential)


def layers_of(module: nn.Module, example: torch.Tensor) -> list[nn.Module]:
    """Return layers that compute, one after the other, the same as the module's ``forward`` with its one tensor.

    A layer ends wherever the rest of ``forward`` needs only a single tensor. Operations without parameters, such as a
    ReLU or a reshape, belong to the layer before them. The layers share the module's parameters. Unless the module or
    ``example`` is on the meta device, the outputs of the module and of the layers for ``example`` are compared.

    Raises:
        InputError: ``forward`` depends on values, takes several tensors, or gives other outputs than the layers.
    """
    name = type(module).__name__
    try:
        graph = _Tracer().trace(module)
    except Exception as error:
        problem = f"'forward' of {name} cannot be traced: {type(error).__name__}: {error}".splitlines()[0]
        raise InputError(problem, valid=_ADVICE) from error
    if sum(node.op == "placeholder" for node in graph.nodes) != 1:
        raise InputError(f"'forward' of {name} takes more than one tensor", valid=_ADVICE)
    layers = [_layer(module, nodes) for nodes in _split(graph, module)]
    _compare(module, layers, example, name)
    return layers


def _split(graph: fx.Graph, module: nn.Module) -> list[list[fx.Node]]:
    """Split the graph's nodes before each module with parameters, where later nodes use only the last node's output."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    place = {node: number for number, node in enumerate(nodes)}
    last_use = [max(place.get(user, len(nodes)) for user in [*node.users, node]) for node in nodes]
    parts: list[list[fx.Node]] = [[]]
    (entering,) = (node for node in graph.nodes if node.op == "placeholder")
    input_until = max((place.get(user, len(nodes)) for user in entering.users), default=-1)
    for number, node in enumerate(nodes):
        live = [before for before in range(number) if last_use[before] >= number]
        alone = live == [number - 1] and input_until < number
        if alone and node.op == "call_module" and list(module.get_submodule(str(node.target)).parameters()):
            parts.append([])
        parts[-1].append(node)
    return parts


def _layer(module: nn.Module, nodes: Sequence[fx.Node]) -> nn.Module:
    if len(nodes) == 1 and nodes[0].op == "call_module":
        return module.get_submodule(str(nodes[0].target))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    entering = graph.placeholder("entering")
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda argument: copies.get(argument, entering))
    graph.output(copies[nodes[-1]])
    first = next((node for node in nodes if node.op == "call_module"), None)
    name = type(module.get_submodule(str(first.target)) if first is not None else module).__name__
    return fx.GraphModule(module, graph, class_name=name)


def _compare(module: nn.Module, layers: Sequence[nn.Module], example: torch.Tensor, name: str) -> None:
    if any(parameter.is_meta for parameter in module.parameters()) or example.is_meta:
        return
    chain = nn.Sequential(*layers)
    # A submodule may be frozen, in another mode than the rest.
    modes = [(each, each.training) for each in (*module.modules(), *chain.modules())]
    module.eval()
    chain.eval()
    with torch.no_grad():
        expected: Any = module(example)
        found: Any = chain(example)
    for each, mode in modes:
        each.training = mode
    tensors = isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor)
    if not tensors or expected.shape != found.shape:
        raise InputError(f"the outputs of {name} and of its layers one after the other differ in shape", valid=_ADVICE)
    if not torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        difference = float((found - expected).abs().max())
        raise InputError(f"the outputs of {name} and of its layers differ by {difference:.2g}", valid=_ADVICE)
