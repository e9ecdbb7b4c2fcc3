"""`ropebridge profile import`: published profiles become models of scenarios."""

import json
from pathlib import Path

import pytest

from planner.files.scenario import read_scenario
from tests.helpers.processes.command import ropebridge

CONFIG = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
}
METIS = {
    "model": {"model_name": "toy", "parameters": {"parameters_per_layer_bytes": [4, 8]}},
    "execution_time": {"layer_compute_total_ms": [3.0, 6.0]},
    "execution_memory": {"layer_memory_total_mb": [1, 1]},
}
GRAPH = """\
node1 -- Linear(2, 2) -- forward_compute_time=3.000, backward_compute_time=6.000, activation_size=64.0, parameter_size=4
node2 -- Linear(2, 2) -- forward_compute_time=3.000, backward_compute_time=6.000, activation_size=64.0, parameter_size=4
\tnode1 -- node2
"""
TIMES = {"toy": {"V100-16": {"1": {"1": {"0": [0.1, 0.2, 0.1], "1": [0.1, 0.2, 0.1]}}}}}
SIZE = {"params_bytes": 4, "act_output_bytes": 8, "act_mem_bytes": 8}
SIZES = {"toy": {"1": {"0": SIZE, "1": SIZE}}}

SCENARIO = """
name: imported
model: model.yaml
cluster:
  devices:
    - {name: one, kind: v100-16, region: here}
    - {name: two, kind: v100-16, region: here}
  links:
    - {from: here, to: here, bandwidth: 1 Gbit/s, latency: 1 ms}
training: {global_batch: 4}
"""

COMMANDS = {
    "huggingface": ["config.json", "--tokens", "256", "--name", "gpt2"],
    "metis": ["DeviceType.V100_tp1_bs1.json", "--layer-output", "8 B", "--kind", "V100=v100-16"],
    "pipedream": ["graph.txt", "--samples", "8", "--kind", "v100-16", "--name", "toy"],
    "sailor": ["times.json", "sizes.json"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"config.json": CONFIG, "DeviceType.V100_tp1_bs1.json": METIS, "times.json": TIMES, "sizes.json": SIZES}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "graph.txt").write_text(GRAPH)
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    return tmp_path


@pytest.mark.parametrize("format_", COMMANDS)
def test_what_is_imported_is_the_model_of_a_scenario(format_: str, folder: Path) -> None:
    done = ropebridge("profile", "import", format_, *COMMANDS[format_], "-o", "model.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "written to model.yaml: name it as 'model:' of a scenario" in done.stdout
    model = read_scenario(folder / "scenario.yaml").model
    assert len(model.layers) == (14 if format_ == "huggingface" else 2)
    assert model.name == ("gpt2" if format_ == "huggingface" else "toy")
    assert all(layer.times["v100-16"].at(1).total_s > 0 for layer in model.layers)
    if format_ == "huggingface":
        assert "124,439,808 parameters; head and embedding share a table" in done.stdout
    # The same again completes the file with nothing new.
    before = (folder / "model.yaml").read_bytes()
    again = ropebridge("profile", "import", format_, *COMMANDS[format_], "-o", "model.yaml", "--json", cwd=folder)
    assert again.returncode == 0, again.stderr
    assert len(json.loads(again.stdout)["layers"]) == len(model.layers)
    assert (folder / "model.yaml").read_bytes() == before


@pytest.mark.parametrize(("file", "name"), [("config.json", "gpt-small"), ("tiny.json", "tiny")])
def test_a_config_names_its_model_by_the_folder_or_by_its_own_name(file: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "gpt-small"
    folder.mkdir()
    (folder / file).write_text(json.dumps(CONFIG))
    done = ropebridge("profile", "import", "huggingface", file, "--tokens", "16", "-o", "model.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "model.yaml").read_text().startswith(f"name: {name}\n")


SAILOR = "{name: toy, sailor: {times: times.json, sizes: sizes.json, model: toy}}"


@pytest.mark.parametrize("format_", [*COMMANDS, SAILOR])
def test_measured_profiles_are_of_fp32(format_: str, folder: Path) -> None:
    """Sizes that follow from counted operations are those of any precision."""
    text = SCENARIO.replace("global_batch: 4", "global_batch: 4, precision: bf16")
    if format_ == SAILOR:
        text = text.replace("model.yaml", SAILOR)
    else:
        ropebridge("profile", "import", format_, *COMMANDS[format_], "-o", "model.yaml", cwd=folder)
    (folder / "scenario.yaml").write_text(text)
    done = ropebridge("simulate", "scenario.yaml", "--strategy", "megatron", "--steps", "1", cwd=folder)
    if format_ == "huggingface":
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 2
    assert "the model was measured in fp32" in done.stderr
    assert "but is trained in bf16; set 'precision: fp32' in 'training'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["huggingface", "graph.txt"], "graph.txt: the file is not JSON"),
        (["huggingface", "times.json"], "times.json: the file has no key 'model_type'"),
        (
            ["huggingface", "config.json", "--tokens", "2000"],
            "--tokens: samples of 2000 tokens are not allowed; give 1 to 1024",
        ),
        (
            ["huggingface", "config.json", "--samples", "2"],
            "--samples: the format 'huggingface' does not use this option",
        ),
        (["huggingface", "config.json", "graph.txt"], "huggingface: 2 files are given; give one config.json"),
        (["huggingface", "missing.json"], "missing.json: the file cannot be read"),
        (["metis", "DeviceType.V100_tp1_bs1.json"], "--layer-output: Metis' files do not contain"),
        (["metis", "DeviceType.V100_tp1_bs1.json", "--layer-output", "8"], "--layer-output: '8' has no unit"),
        (["metis", "config.json", "--layer-output", "8 B"], "the file's name does not say what was measured"),
        (["metis", "DeviceType.V100_tp1_bs1.json", "--layer-output", "8 B", "--kind", "a100"], "--kind: 'a100'"),
        (["pipedream", "graph.txt", "--kind", "v100-16"], "--samples: PipeDream's file does not say"),
        (["pipedream", "graph.txt", "--samples", "8"], "--kind: PipeDream's file does not name"),
        (
            ["pipedream", "config.json", "--samples", "8", "--kind", "k"],
            "config.json:1: the line is neither a node nor an edge",
        ),
        (["sailor", "times.json"], "sailor: 1 files are given; give two: layer_times.json layer_sizes.json"),
        (["sailor", "times.json", "sizes.json", "--name", "tay"], "did you mean 'toy'?"),
        (["sailor", "sizes.json", "times.json"], "the module planner.files.importers.sailor describes the file"),
        (["pipedream", "graph.txt", "--samples", "8", "--kind", "k", "-o", "no/model.yaml"], "no/model.yaml"),
    ],
)
def test_what_cannot_be_imported_is_refused(arguments: list[str], message: str, folder: Path) -> None:
    before = sorted(folder.iterdir())
    target = [] if "-o" in arguments else ["-o", "model.yaml"]
    done = ropebridge("profile", "import", *arguments, *target, cwd=folder)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert sorted(folder.iterdir()) == before


def test_the_file_of_another_model_is_left_alone(folder: Path) -> None:
    (folder / "model.yaml").write_text("name: other\nlayers: []\n")
    done = ropebridge("profile", "import", "sailor", "times.json", "sizes.json", "-o", "model.yaml", cwd=folder)
    assert done.returncode == 2
    assert "model.yaml: there is another model in this file" in done.stderr
    assert (folder / "model.yaml").read_text() == "name: other\nlayers: []\n"
