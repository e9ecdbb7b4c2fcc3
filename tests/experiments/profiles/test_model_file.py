"""Model files: what is written is read back, to the last bit."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.profiles.model_file import ModelLayers, add_to_model_file, refuse_another_model
from planner.files.documents import Document
from planner.files.model import read_model
from planner.files.parsing import Part
from planner.scenario.datasheet import find_kind
from planner.scenario.profile import LayerProfile, ModelProfile, PassMemory, SplitMemory, TimeTable, Workspace
from planner.scenario.roofline import LayerWork, roofline_layer
from planner.scenario.scenario import ModelCode
from traces.common.errors import InputError

KIND = find_kind("jetson-tx2")

SECONDS = st.one_of(st.just(0.0), st.floats(1e-9, 1e4), st.integers(1, 10**6).map(lambda each: each / 1e6))
BYTES = st.integers(0, 2**50)
FLOP = st.one_of(st.integers(0, 10**15).map(float), st.floats(0, 1e15))
NAMES = st.text("abcdefgh-0123456789", min_size=1, max_size=8)


@st.composite
def tables(draw: st.DrawFn) -> TimeTable:
    samples = draw(st.lists(st.integers(1, 2000), min_size=1, max_size=4, unique=True).map(sorted))
    columns = [tuple(draw(SECONDS) for _ in samples) for _ in range(3)]
    return TimeTable(tuple(samples), *columns)


SPACES = st.builds(Workspace, BYTES, BYTES)
MEMORY = st.builds(PassMemory, BYTES, SPACES, st.none() | st.builds(SplitMemory, BYTES, SPACES, SPACES, SPACES))


@st.composite
def measured(draw: st.DrawFn, name: str, kinds: list[str]) -> LayerProfile:
    updates = {kind: draw(SECONDS) for kind in kinds if draw(st.booleans())}
    sizes = (draw(BYTES), draw(BYTES), draw(BYTES))
    memory = draw(st.none() | MEMORY)
    return LayerProfile(name, *sizes, {kind: draw(tables()) for kind in kinds}, updates, memory=memory)


def read_back(path: Path, name: str) -> ModelProfile:
    """As a scenario reads it."""
    scenario = path.with_name("scenario.yaml")
    scenario.write_text(yaml.safe_dump({"model": path.name}))
    model, code = read_model(Part(Document(scenario), "model"), {KIND.name: KIND}, "fp32")
    assert code is None
    assert model.name == name
    return model


@settings(max_examples=60)
@given(st.data())
def test_measured_layers(data: st.DataObject) -> None:
    names = data.draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    kinds = data.draw(st.lists(NAMES, min_size=1, max_size=2, unique=True))
    layers = [data.draw(measured(name, kinds)) for name in names]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.yaml"
        add_to_model_file(path, ModelLayers("made up", layers))
        assert read_back(path, "made up").layers == tuple(layers)


def test_a_file_that_is_json_stays_json(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    for kind in ("one", "two"):
        add_to_model_file(path, ModelLayers("m", [layer("a", kind, 1.0)]))
    assert sorted(json.loads(path.read_text())["layers"][0]["times"]) == ["one", "two"]
    assert read_back(path, "m").layers[0].times["one"].forward_s == (1.0,)


@settings(max_examples=60)
@given(st.lists(st.builds(LayerWork, NAMES, FLOP, BYTES, BYTES, BYTES), min_size=1, max_size=4))
def test_counted_layers(layers: list[LayerWork]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.yaml"
        add_to_model_file(path, ModelLayers("made up", layers))
        found = read_back(path, "made up").layers
    assert [layer.times for layer in found] == [roofline_layer(each, [KIND], "fp32").times for each in layers]
    sizes = [(each.parameter_bytes, each.output_bytes, each.activation_bytes) for each in layers]
    assert [(each.parameter_bytes, each.output_bytes, each.activation_bytes) for each in found] == sizes


def layer(name: str, kind: str, forward_s: float) -> LayerProfile:
    return LayerProfile(name, 8, 4, 4, {kind: TimeTable((1,), (forward_s,), (0.5,), (0.25,))})


def test_equal_layers_are_one_entry_and_get_numbers(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    add_to_model_file(path, ModelLayers("m", [layer("a", "k", 1.0), *[layer("b", "k", 2.0)] * 3, layer("b", "k", 3.0)]))
    assert len(yaml.safe_load(path.read_text())["layers"]) == 3
    assert [each.name for each in read_back(path, "m").layers] == ["a", "b-0", "b-1", "b-2", "b"]


def test_another_kind_is_added_and_a_new_measurement_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    for kind, forward_s in (("one", 1.0), ("two", 2.0), ("one", 3.0)):
        add_to_model_file(path, ModelLayers("m", [layer("a", kind, forward_s)]))
    (found,) = read_back(path, "m").layers
    assert {kind: table.forward_s for kind, table in found.times.items()} == {"one": (3.0,), "two": (2.0,)}


def test_of_the_memory_on_two_kinds_the_larger_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    split = SplitMemory(5, weight=Workspace(1, 7))
    measured = {
        "old": None,
        "one": PassMemory(4, Workspace(3, 1)),
        "two": PassMemory(2, Workspace(1, 8), split),
        "three": PassMemory(2, Workspace(2, 2), SplitMemory(6)),
    }
    for kind, memory in measured.items():
        add_to_model_file(path, ModelLayers("m", [replace(layer("a", kind, 1.0), memory=memory)]))
    (found,) = read_back(path, "m").layers
    assert found.memory == PassMemory(4, Workspace(3, 8), replace(split, deferred_bytes=6))
    assert found.times.keys() == measured.keys()


@pytest.mark.parametrize("text", ["name: n\nlayers: []\n", "[1, 2]\n", "name: m\nlayers: [{name: a}]\n", "name: m\n"])
def test_a_file_of_something_else_is_left_alone(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match="there is another model in this file"):
        add_to_model_file(path, ModelLayers("m", [layer("a", "k", 1.0)]))
    assert path.read_text() == text


def test_another_model_is_refused_before_it_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    code, wider = (ModelCode(tmp_path / "m.py", {"width": width}) for width in (8, 9))
    refuse_another_model(path, "m", code, 3)
    add_to_model_file(path, ModelLayers("m", [layer("a", "k", 1.0)] * 3, code))
    refuse_another_model(path, "m", code, 3)
    for name, built, layers in (("other", code, 3), ("m", code, 2), ("m", wider, 3)):
        with pytest.raises(InputError, match="there is another model"):
            refuse_another_model(path, name, built, layers)
    add_to_model_file(tmp_path / "work.yaml", ModelLayers("m", [LayerWork("a", 1.0, 8, 4, 4)]))
    with pytest.raises(InputError, match="there is another model"):
        add_to_model_file(tmp_path / "work.yaml", ModelLayers("m", [layer("a", "k", 1.0)]))


def test_costs_of_two_precisions_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    add_to_model_file(path, ModelLayers("m", [layer("a", "old", 1.0)]))
    written = path.read_text()
    assert "precision" not in written, "as before files stated it"
    for refused in (
        lambda: refuse_another_model(path, "m", layers=1, precision="bf16"),
        lambda: add_to_model_file(path, ModelLayers("m", [layer("a", "new", 1.0)], precision="bf16")),
    ):
        with pytest.raises(InputError, match="in this file were measured in fp32, but the new ones are of bf16"):
            refused()
    assert path.read_text() == written
    with pytest.raises(InputError, match="there is another model in this file"):
        refuse_another_model(path, "m", layers=1, precision=None)
    refuse_another_model(path, "m", layers=1, precision="fp32")
    add_to_model_file(path, ModelLayers("m", [layer("a", "new", 1.0)], precision="fp32"))
    assert yaml.safe_load(path.read_text())["precision"] == "fp32"
    assert set(read_back(path, "m").layers[0].times) == {"old", "new"}
    path.write_text(path.read_text().replace("fp32", "fp23"))
    with pytest.raises(InputError, match=r"precision: unknown precision 'fp23'; .*valid: fp32, "):
        refuse_another_model(path, "m", layers=1, precision="fp32")
