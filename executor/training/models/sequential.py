"""A module as the list of layers that a pipeline needs, for models that were not written as one: torchvision's, say.

from executor.training.models.sequential import layers_of

class Classifier:
def __init__(self):
self.layers = layers_of(torchvision.models.resnet18(), torch.zeros(2, 3, 224, 224))
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from traces.common.errors import InputError

_ADVICE = "write 'layers' by hand, a list of modules of which each takes what the one before it returns"
_TOLERANCE = 1e-5


class _Tracer(fx.Tracer):
    """Goes into the module itself and into lists of modules, and no deeper: blocks stay whole."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, nn.Sequential)


def layers_of(module: nn.Module, example: torch.Tensor) -> list[nn.Module]:
    """Return layers that, one after the other, do what the module's ``forward`` does with its one tensor.

    A layer ends wherever a single tensor is all that the rest needs; what has no parameters of its own, as a ReLU or a
    reshaping, belongs to the layer before it. Parameters are the module's own. Both are run on the example and
    compared, unless the module has no memory.

    Args:
        module: Takes one tensor and returns one.
        example: Such a tensor, of a few samples.

    Raises:
        InputError: What ``forward`` does depends on values, is no chain, or is not done by these layers.
    """
    name = type(module).__name__
    try:
        graph = _Tracer().trace(module)
    except Exception as error:
        problem = f"'forward' of {name} cannot be followed: {type(error).__name__}: {error}".splitlines()[0]
        raise InputError(problem, valid=_ADVICE) from error
    if sum(node.op == "placeholder" for node in graph.nodes) != 1:
        raise InputError(f"'forward' of {name} takes more than one tensor", valid=_ADVICE)
    layers = [_layer(module, piece) for piece in _pieces(graph, module)]
    _compare(module, layers, example, name)
    return layers


def _pieces(graph: fx.Graph, module: nn.Module) -> list[list[fx.Node]]:
    """The steps of a graph, cut where one value crosses and something with parameters follows."""
    steps = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    place = {node: number for number, node in enumerate(steps)}
    last_use = [max(place.get(user, len(steps)) for user in [*node.users, node]) for node in steps]
    pieces: list[list[fx.Node]] = [[]]
    # The last step at which the graph's own input is used.
    (entering,) = (node for node in graph.nodes if node.op == "placeholder")
    input_until = max((place.get(user, len(steps)) for user in entering.users), default=-1)
    for number, node in enumerate(steps):
        crossing = [before for before in range(number) if last_use[before] >= number]
        alone = crossing == [number - 1] and input_until < number
        if alone and node.op == "call_module" and list(module.get_submodule(str(node.target)).parameters()):
            pieces.append([])
        pieces[-1].append(node)
    return pieces


def _layer(module: nn.Module, piece: Sequence[fx.Node]) -> nn.Module:
    if len(piece) == 1 and piece[0].op == "call_module":
        return module.get_submodule(str(piece[0].target))
    graph = fx.Graph()
    inside: dict[fx.Node, fx.Node] = {}
    entering = graph.placeholder("entering")

    def within(node: fx.Node) -> fx.Node:
        return inside.get(node, entering)

    for node in piece:
        inside[node] = graph.node_copy(node, within)
    graph.output(inside[piece[-1]])
    first = next((node for node in piece if node.op == "call_module"), None)
    name = type(module.get_submodule(str(first.target)) if first is not None else module).__name__
    return fx.GraphModule(module, graph, class_name=name)


def _compare(module: nn.Module, layers: Sequence[nn.Module], example: torch.Tensor, name: str) -> None:
    if any(parameter.is_meta for parameter in module.parameters()) or example.is_meta:
        return
    training = module.training
    module.eval()
    for layer in layers:
        layer.eval()
    with torch.no_grad():
        expected: Any = module(example)
        found = example
        for layer in layers:
            found = layer(found)
    module.train(training)
    for layer in layers:
        layer.train(training)
    tensors = isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor)
    if not tensors or expected.shape != found.shape:
        raise InputError(f"{name} returns something else than its layers one after the other", valid=_ADVICE)
    if not torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        difference = float((found - expected).abs().max())
        raise InputError(f"{name} and its layers one after the other differ by {difference:.2g}", valid=_ADVICE)
