"""`ropebridge profile model config.json`: a model of transformers is measured, and trained with what was measured."""

import json
from pathlib import Path

import pytest
import yaml

from executor.training.models.loading import check_model
from planner.files.scenario import read_scenario
from planner.scenario.scenario import HuggingFaceCode
from tests.helpers.processes.command import ropebridge
from tests.helpers.scenarios.huggingface import GPT2, LLAMA, TOKENS

KIND = {"peak": "1 TFLOP/s", "memory": "1 GB", "memory_bandwidth": "10 GB/s"}


def profiled(folder: Path, config: dict, *options: object) -> Path:
    """Measure a model, and return a scenario with it on two devices of the measured kind."""
    (folder / "config.json").write_text(json.dumps(config))
    command = ["profile", "model", folder / "config.json", "--tokens", TOKENS, "--repeats", 1, *options]
    done = ropebridge(*command, "-o", folder / "model.yaml")
    assert done.returncode == 0, done.stderr
    document = {
        "name": "measured",
        "cluster": {
            "devices": [{"name": name, "kind": "cpu", "region": "here"} for name in ("one", "two")],
            "kinds": {"cpu": KIND},
            "links": [{"inside": "here", "bandwidth": "1 Gbit/s", "latency": "0 s"}],
        },
        "model": "model.yaml",
        "training": {"global_batch": 4, **({"precision": "bf16"} if "bf16" in options else {})},
    }
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_what_was_measured_is_what_is_trained(tmp_path: Path) -> None:
    scenario = read_scenario(profiled(tmp_path, GPT2, "--samples", "1,2"))
    assert scenario.code == HuggingFaceCode(tmp_path / "config.json", GPT2, TOKENS)
    assert scenario.model.tied_layers == (0, 5)
    assert all(layer.times["cpu"].samples == (1, 2) for layer in scenario.model.layers)
    check_model(scenario)


@pytest.mark.slow
def test_a_measurement_beside_another_rank_in_half_precision(tmp_path: Path) -> None:
    path = profiled(tmp_path, LLAMA, "--samples", "1", "--ranks", 2, "--precision", "bf16")
    done = ropebridge("run", path, "--strategy", "gpipe", "--steps", 2)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("config.json", [], "'--tokens N' measures a config.json; 'ropebridge profile import huggingface"),
        ("config.json", ["--tokens", 12, "--device", "meta"], "'ropebridge profile import huggingface"),
        ("config.json", ["--tokens", 12, "--set", "width=4"], "those of a config.json without arguments"),
        ("model.py", ["--tokens", 12], "those of a config.json without arguments"),
        ("config.json", ["--tokens", 12], "model_type"),
    ],
)
def test_what_cannot_be_measured_is_refused(name: str, options: list[object], message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    done = ropebridge("profile", "model", tmp_path / name, *options, "-o", tmp_path / "model.yaml")
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "model.yaml").exists()
