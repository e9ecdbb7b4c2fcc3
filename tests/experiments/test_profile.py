"""`ropebridge profile model` on this machine's CPU."""

import json
from pathlib import Path

import pytest
from command import ropebridge
from torch import nn

from executor.model import SampleShape, load_with_sizes
from executor.model_profile import activation_bytes
from planner.files.scenario_file import read_scenario
from planner.scenario import ModelCode
from traces.errors import InputError

MODELS = Path(__file__).parents[2] / "experiments" / "models"
ARGUMENTS = {"vocabulary": 32, "width": 32, "heads": 2, "blocks": 2, "length": 16}
OPTIONS = [each for key, value in ARGUMENTS.items() for each in ("--set", f"{key}={value}")]
QUICK = ["--samples", "1,3", "--repeats", "1"]

SCENARIO = """
name: profiled
model: {model}
cluster:
  devices:
    - {{name: one, kind: raspberry-pi-4, region: here, memory: 1 GiB}}
    - {{name: two, kind: jetson-nano, region: here, memory: 1 GiB}}
  links:
    - {{from: here, to: here, bandwidth: 1 Gbit/s, latency: 1 ms}}
training: {{global_batch: 4}}
"""


def test_a_profile_of_two_kinds_is_the_model_of_a_scenario(tmp_path: Path) -> None:
    file = tmp_path / "gpt.yaml"
    for kind in ("raspberry-pi-4", "jetson-nano"):
        done = ropebridge("profile", "model", MODELS / "gpt.py", *OPTIONS, *QUICK, "--kind", kind, "-o", file)
        assert done.returncode == 0, done.stderr
        assert "name it as 'model:' of a scenario" in done.stdout
    (tmp_path / "scenario.yaml").write_text(SCENARIO.format(model=file))
    scenario = read_scenario(tmp_path / "scenario.yaml")
    sizes = load_with_sizes(ModelCode(MODELS / "gpt.py", ARGUMENTS), seed=0).sizes
    assert [layer.parameter_bytes for layer in scenario.model.layers] == [size.parameter_bytes for size in sizes]
    assert [layer.output_bytes for layer in scenario.model.layers] == [size.output.size_bytes for size in sizes]
    assert all(layer.activation_bytes > 0 for layer in scenario.model.layers[1:])
    for layer in scenario.model.layers:
        assert layer.times.keys() == {"raspberry-pi-4", "jetson-nano"}
        assert all(table.samples == (1, 3) and min(table.forward_s) > 0 for table in layer.times.values())
    assert scenario.code is not None
    assert scenario.code.path == MODELS / "gpt.py"
    planned = ropebridge("simulate", tmp_path / "scenario.yaml", "--steps", "2")
    assert planned.returncode == 0, planned.stderr


def test_the_intervals_hold_the_medians(tmp_path: Path) -> None:
    done = ropebridge("profile", "model", MODELS / "gpt.py", *OPTIONS, *QUICK, "-o", tmp_path / "gpt.yaml", "--json")
    assert done.returncode == 0, done.stderr
    layers = json.loads(done.stdout)["layers"]
    times = [time for layer in layers for sizes in layer["times"].values() for time in sizes.values()]
    assert all(time["least_s"] <= time["median_s"] <= time["most_s"] for time in times)
    assert any(time["least_s"] < time["most_s"] for time in times)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", "4,2"], "--samples: '4,2'; give rising whole numbers"),
        (["--set", "width"], "--set: 'width' sets nothing; write KEY=VALUE"),
        (["--optimizer", "adam"], "unknown optimizer 'adam'"),
        (["--set", "wide=3"], "'build' does not take these arguments"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    done = ropebridge("profile", "model", MODELS / "gpt.py", *OPTIONS, *options, "-o", tmp_path / "gpt.yaml")
    assert done.returncode == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_another_model_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "gpt.yaml"
    file.write_text("name: other\nlayers: []\n")
    done = ropebridge("profile", "model", MODELS / "gpt.py", *OPTIONS, *QUICK, "-o", file)
    assert done.returncode == 2
    assert "there is another model in this file" in done.stderr
    assert file.read_text() == "name: other\nlayers: []\n"


def test_what_a_layer_keeps_is_what_autograd_saves() -> None:
    """A linear layer keeps its inputs, ReLU its outputs: 4 bytes a number."""
    layer, shape = nn.Sequential(nn.Linear(6, 5), nn.ReLU()), SampleShape((6,), nn.Linear(1, 1).weight.dtype)

    def refuse(_: int) -> object:
        raise InputError("the layer is not the first one")

    assert activation_bytes(layer, shape, refuse) == 4 * (6 + 5)  # type: ignore[arg-type]
