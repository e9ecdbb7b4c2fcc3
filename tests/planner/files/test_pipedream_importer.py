"""PipeDream's graphs: a made-up one of its form, with a branch, a shape, and an output of several tensors."""

from pathlib import Path

import pytest

from planner.files.importers.pipedream import read_pipedream
from traces.common.errors import InputError

SAMPLES = 10


def node(number: int, what: str, forward: float, backward: float, activation: str, parameters: float) -> str:
    return (
        f"node{number} -- {what} -- forward_compute_time={forward:.3f}, backward_compute_time={backward:.3f}, "
        f"activation_size={activation}, parameter_size={parameters:.3f}"
    )


# Nodes stand in any order; the branch from 2 joins at 5.
GRAPH = [
    node(4, "ReLU(inplace)", 0.5, 0.25, "400.000", 0),
    node(1, "Input", 99.0, 0.0, "1000.000", 0),
    node(2, "Conv2d(3, 64, kernel_size=(7, 7))", 4.0, 2.0, "800.000", 64),
    node(3, "LSTM(8, 8)", 2.0, 6.0, "[400.0; 20.0]", 128),
    node(5, "Add(inplace)", 0.0, 0.0, "800.000", 0) + " -- stage_id=1",
    node(6, "__getitem__(1)", 0.0, 0.0, "20.0", 0),
    node(7, "Linear(in_features=8, out_features=4, bias=True)", 1.0, 2.0, "40.000", 256),
    "\tnode1 -- node2",
    "\tnode2 -- node3",
    "\tnode3 -- node4",
    "\tnode3 -- node6",
    "\tnode2 -- node5",
    "\tnode4 -- node5",
    "\tnode5 -- node7",
]


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "graph.txt"
    path.write_text("\n".join(GRAPH))
    return path


def test_operators_follow_what_they_take(graph: Path) -> None:
    model = read_pipedream(graph, SAMPLES, "v100-16", "toy")
    names = ["node2-Conv2d", "node3-LSTM", "node4-ReLU", "node5-Add", "node7-Linear"]
    assert model.name == "toy"
    assert [layer.name for layer in model.layers] == names
    assert [layer.parameter_bytes for layer in model.layers] == [64, 128, 0, 0, 256]
    assert [layer.activation_bytes for layer in model.layers] == [80, 42, 40, 80, 4]


def test_a_pipeline_hands_on_what_a_later_layer_needs(graph: Path) -> None:
    outputs = [layer.output_bytes for layer in read_pipedream(graph, SAMPLES, "v100-16", "toy").layers]
    assert outputs == [80, 80 + 42, 80 + 40, 80, 4]


def test_times_are_of_the_whole_minibatch(graph: Path) -> None:
    model = read_pipedream(graph, SAMPLES, "v100-16", "toy")
    tables = [layer.times["v100-16"] for layer in model.layers]
    assert all(table.samples == (SAMPLES,) for table in tables)
    assert [table.forward_s for table in tables] == [(0.004,), (0.002,), (0.0005,), (0.0,), (0.001,)]
    # Nothing before the first layer has parameters; a ReLU has none itself.
    assert [table.backward_input_s for table in tables] == [(0.0,), (0.003,), (0.00025,), (0.0,), (0.001,)]
    assert [table.backward_weight_s for table in tables] == [(0.002,), (0.003,), (0.0,), (0.0,), (0.001,)]


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (3, "node2 -- Conv2d", ":3: the line is neither a node nor an edge"),
        (3, GRAPH[2].replace("time=4.000", "time=four"), ":3: the line is neither a node nor an edge"),
        (3, GRAPH[2].replace("time=4.000", "time=4.0.0"), ":3: could not convert"),
        (3, GRAPH[2].replace("time=4.000", "time=-4.000"), ":3: a time or a size is out of range"),
        (3, GRAPH[2].replace("time=4.000", "time=nan"), ":3: a time or a size is out of range"),
        (3, GRAPH[0], ":3: node 'node4' is there already"),
        (9, "\tnode2 -- node9", ":9: there is no node 'node9'"),
        (9, "\tnode7 -- node2", "the graph has a cycle"),
    ],
)
def test_what_is_no_graph_is_refused(line: int, text: str, message: str, graph: Path) -> None:
    graph.write_text("\n".join([*GRAPH[: line - 1], text, *GRAPH[line:]]))
    with pytest.raises(InputError) as caught:
        read_pipedream(graph, SAMPLES, "v100-16", "toy")
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(graph))


def test_files_that_are_none(tmp_path: Path) -> None:
    for content, message in ((b"", "the file has no node"), (b"\xff\xfe", "this is a binary file")):
        (tmp_path / "graph.txt").write_bytes(content)
        with pytest.raises(InputError, match=message):
            read_pipedream(tmp_path / "graph.txt", SAMPLES, "v100-16", "toy")
    with pytest.raises(InputError, match="cannot be read"):
        read_pipedream(tmp_path / "missing.txt", SAMPLES, "v100-16", "toy")
