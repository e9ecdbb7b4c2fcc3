"""Reads layer profiles of msr-fiddle/pipedream's profiler: ``graph.txt``, a node or an edge on each line.

    node2 -- Conv2d(3, 64, ...) -- forward_compute_time=22.316, backward_compute_time=6.405,
        activation_size=198246400.0, parameter_size=93184.000[ -- stage_id=0]      (all of it on one line)
    <tab>node1 -- node2

Values are milliseconds and bytes for one minibatch; the file gives neither the minibatch's size nor the device. An
operator with several outputs lists their sizes: ``[6291456.0; 131072.0]``. The format is that of graph/graph.py in that
repository. As in optimizer/optimizer_graph_hierarchical.py, inputs cost nothing, and unused outputs are left out.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from planner.files.importers import MOST, read_bytes
from planner.scenario.profile import LayerProfile, ModelProfile, TimeTable
from traces.common.errors import InputError

_NUMBER = r"[-+.\deE]+|inf|nan"
_NODE = re.compile(
    r"(?P<name>\S+) -- (?P<what>.*) -- "
    rf"forward_compute_time=(?P<forward>{_NUMBER}), backward_compute_time=(?P<backward>{_NUMBER}), "
    rf"activation_size=(?P<activation>{_NUMBER}|\[[^\]]*\]), parameter_size=(?P<parameters>{_NUMBER})"
    r"( -- stage_id=\d+)?"
)
_EDGE = re.compile(r"\t(?P<source>\S+) -- (?P<target>\S+)")
_LONGEST_NAME = 60


@dataclass(slots=True)
class _Node:
    name: str
    what: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float
    sources: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)


def read_pipedream(path: Path, samples: int, kind: str, name: str) -> ModelProfile:
    """Return the profile in a file, with the operators of the graph as layers in topological order.

    ``samples`` is the size of the minibatch and ``kind`` the device kind with which the model was measured; ``name``
    becomes the model's name. The output of a layer includes the outputs of earlier layers that later layers use,
    because a stage must forward them. A layer saves its own output. Assumption: half of a backward is the input
    gradient; all of the backward for a layer without parameters; nothing if no earlier layer has parameters.

    Raises:
        InputError: The file is missing or malformed, or its graph has a cycle.
    """
    nodes = _needed(_read(path))
    order = _in_order(nodes, path)
    place = {node.name: number for number, node in enumerate(order)}
    last_use = [max((place[target] for target in node.targets), default=-1) for node in order]
    layers = []
    trained = False
    for number, node in enumerate(order):
        outgoing = [each for each, until in zip(order[: number + 1], last_use, strict=False) if until > number]
        output_bytes = sum(each.activation_bytes for each in outgoing) or node.activation_bytes
        input_share = 0.0 if not trained else 0.5 if node.parameter_bytes else 1.0
        trained = trained or node.parameter_bytes > 0
        layers.append(
            LayerProfile(
                f"{node.name}-{node.what.partition('(')[0]}"[:_LONGEST_NAME],
                round(node.parameter_bytes),
                round(output_bytes / samples),
                round(node.activation_bytes / samples),
                {
                    kind: TimeTable(
                        (samples,),
                        (node.forward_s,),
                        (input_share * node.backward_s,),
                        ((1 - input_share) * node.backward_s,),
                    )
                },
            )
        )
    return ModelProfile(name, tuple(layers))


def _read(path: Path) -> dict[str, _Node]:
    try:
        lines = read_bytes(path).decode().splitlines()
    except UnicodeDecodeError:
        raise InputError("this is a binary file", where=str(path), valid="give PipeDream's graph.txt") from None
    nodes: dict[str, _Node] = {}
    edges: list[tuple[int, str, str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        if (edge := _EDGE.fullmatch(line.rstrip())) is not None:
            edges.append((number, edge["source"], edge["target"]))
        elif (node := _NODE.fullmatch(line.strip())) is not None and node["name"] not in nodes:
            nodes[node["name"]] = _node(node.groupdict(), where)
        else:
            problem = (
                "the line is neither a node nor an edge" if node is None else f"node '{node['name']}' is there already"
            )
            raise InputError(problem, where=where, valid=f"the module {__name__} describes the file")
    for number, source, target in edges:
        for end in (source, target):
            if end not in nodes:
                raise InputError(f"there is no node '{end}'", where=f"{path}:{number}", valid="an edge joins two nodes")
        nodes[source].targets.append(target)
        nodes[target].sources.append(source)
    if not nodes:
        raise InputError("the file has no node", where=str(path), valid=f"the module {__name__} describes the file")
    return nodes


def _node(parts: Mapping[str, str], where: str) -> _Node:
    try:
        activations = [float(each) for each in parts["activation"].strip("[]").split(";")]
        forward, backward, parameters = (float(parts[key]) for key in ("forward", "backward", "parameters"))
    except ValueError as error:
        raise InputError(str(error), where=where, valid="times and sizes are numbers") from None
    if not all(0 <= each <= MOST for each in (forward, backward, parameters, *activations)):
        raise InputError("a time or a size is out of range", where=where, valid=f"give 0 to {MOST:.0e} everywhere")
    return _Node(parts["name"], parts["what"], forward / 1000, backward / 1000, sum(activations), parameters)


def _needed(nodes: dict[str, _Node]) -> dict[str, _Node]:
    """Return the nodes without the model's inputs and without unused parts of outputs (``__getitem__``)."""
    left = {
        name: node
        for name, node in nodes.items()
        if not (node.what.startswith("Input") and not node.sources)
        and not (node.what.startswith("__getitem__") and not node.targets)
    }
    for node in left.values():
        node.sources = [each for each in node.sources if each in left]
        node.targets = [each for each in node.targets if each in left]
    return left


def _in_order(nodes: Mapping[str, _Node], path: Path) -> list[_Node]:
    """Return the nodes in topological order, with ties in the order of the file."""
    waits = {name: len(node.sources) for name, node in nodes.items()}
    order: list[_Node] = []
    ready = [node for name, node in nodes.items() if not waits[name]]
    while ready:
        node = ready.pop(0)
        order.append(node)
        for target in node.targets:
            waits[target] -= 1
            if not waits[target]:
                ready.append(nodes[target])
    if len(order) < len(nodes) or not order:
        raise InputError(
            "the graph has a cycle, or only inputs", where=str(path), valid="give graph.txt as the profiler wrote it"
        )
    return order
