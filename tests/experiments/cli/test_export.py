"""`ropebridge export`: what a run has trained, read by transformers and by another run."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.training.models.loading import load_model
from planner.files.plan import write_plan
from planner.files.scenario import read_scenario
from tests.executor.training.test_tensor_parallel import grouped_plan
from tests.helpers.processes.command import ropebridge, ropebridge_process
from tests.helpers.scenarios.huggingface import (
    GPT2,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    VIT,
    original_names,
    train_transformers,
    write_scenario,
)

STEPS = 4


def done(*arguments: object) -> str:
    finished = ropebridge(*arguments)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def refusal(*arguments: object) -> str:
    finished = ropebridge(*arguments)
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr
    return finished.stderr


def logits_of(scenario: Path) -> torch.Tensor:
    """The scores of the first samples by ropebridge's layers."""
    read = read_scenario(scenario)
    assert read.code is not None
    model = load_model(read.code, read.training.seed)
    outputs, _ = model.samples(0, 3)
    with torch.no_grad():
        for layer in model.layers:
            outputs = layer(outputs)
    return outputs


def exported_model(folder: Path, config: Mapping[str, Any]) -> Any:
    import transformers

    is_vit = config["model_type"] == "vit"
    kind = transformers.AutoModelForImageClassification if is_vit else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder)


def logits_of_transformers(folder: Path, config: Mapping[str, Any], scenario: Path) -> torch.Tensor:
    read = read_scenario(scenario)
    assert read.code is not None
    inputs, _ = load_model(read.code, read.training.seed).samples(0, 3)
    with torch.no_grad():
        return exported_model(folder, config)(inputs).logits


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GPT2, id="gpt2"),
        *(
            pytest.param(each, id=each["model_type"], marks=pytest.mark.slow)
            for each in (LLAMA, MISTRAL, QWEN2, QWEN3, VIT)
        ),
    ],
)
def test_exported_weights_give_the_same_logits_and_train_on(config: Mapping[str, Any], tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path, config, 2)
    run = (scenario, "--strategy", "megatron", "--on-this-device", "--steps", STEPS)
    checkpoints = ("--checkpoint", tmp_path / "checkpoints", "--checkpoint-every", STEPS - 1)
    done("run", *run, *checkpoints, "-o", tmp_path / "run")
    said = done("export", tmp_path / "run", "-o", tmp_path / "exported")
    assert "config.json" in said
    assert "model.safetensors" in said

    # By hand: the parameters of the run under transformers' names, which are those of the export.
    trained = load_file(tmp_path / "run" / "parameters.safetensors")
    parameters = original_names(read_scenario(scenario), trained)
    for name, value in exported_model(tmp_path / "exported", config).state_dict().items():
        assert torch.equal(value, parameters[name]), name

    # From the exported configuration and weights as a scenario of their own.
    again = tmp_path / "again"
    again.mkdir()
    write_scenario(again, config, 2, weights="../exported")
    (again / "config.json").write_text((tmp_path / "exported" / "config.json").read_text())
    expected = logits_of_transformers(tmp_path / "exported", config, scenario)
    found = logits_of(again / "scenario.yaml")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    if config is not GPT2:
        # GPT-2 multiplies in another order, since its matrices are stored transposed.
        assert torch.equal(found, expected)
    imported = read_scenario(again / "scenario.yaml")
    assert imported.code is not None
    for index, layer in enumerate(load_model(imported.code, 0).layers):
        for name, value in layer.named_parameters():
            assert torch.equal(value, trained[f"{index}.{name}"]), name

    done("run", again / "scenario.yaml", *run[1:], "-o", tmp_path / "run-again")
    done("export", tmp_path / "run", "-o", tmp_path / "newest", *checkpoints[:2])
    newest = exported_model(tmp_path / "newest", config).state_dict()
    assert all(torch.equal(value, parameters[name]) for name, value in newest.items())


@pytest.mark.slow
@pytest.mark.parametrize("config", [pytest.param(LLAMA, id="llama"), pytest.param(QWEN2, id="qwen2")])
def test_a_run_of_groups_is_exported(config: Mapping[str, Any], tmp_path: Path) -> None:
    """From its end and from a checkpoint, which each device of a group has a part of."""
    scenario = write_scenario(tmp_path, config, 4)
    read = read_scenario(scenario)
    write_plan(grouped_plan(read, [(3, [(2, 1.0)]), (3, [(2, 1.0)])], (6, 6)), tmp_path / "plan.json")
    run = (scenario, "--plan", tmp_path / "plan.json", "--on-this-device", "--steps", STEPS)
    done("run", *run, "--checkpoint", tmp_path / "checkpoints", "-o", tmp_path / "run")
    done("export", tmp_path / "run", "-o", tmp_path / "end")
    done("export", tmp_path / "run", "-o", tmp_path / "newest", "--checkpoint", tmp_path / "checkpoints")
    expected = train_transformers(read, config, STEPS)
    again = tmp_path / "again"
    again.mkdir()
    for folder in ("end", "newest"):
        exported = exported_model(tmp_path / folder, config).state_dict()
        assert exported.keys() == expected.parameters.keys()
        torch.testing.assert_close(dict(exported), dict(expected.parameters), rtol=1e-5, atol=1e-5)
        write_scenario(again, config, 2, weights=f"../{folder}")
        expected_logits = logits_of_transformers(tmp_path / folder, config, again / "scenario.yaml")
        assert torch.equal(logits_of(again / "scenario.yaml"), expected_logits)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path, LLAMA, 2)
    done("simulate", scenario, "--steps", 1, "-o", tmp_path / "simulated")
    refused = refusal("export", tmp_path / "simulated", "-o", tmp_path / "exported")
    assert "there are no parameters; name the folder of a finished run with real compute" in refused
    done("simulate", "digits", "--steps", 1, "-o", tmp_path / "digits")
    save_file({"0.weight": torch.zeros(1)}, tmp_path / "digits" / "parameters.safetensors")
    refused = refusal("export", tmp_path / "digits", "-o", tmp_path / "exported")
    assert "is not one of transformers" in refused
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "nowhere"}, "model.weights: there are no weights 'nowhere'"),
        ({"weights": "wide.safetensors"}, "'lm_head.weight' has shape [64, 16], and in the model of the config.json"),
        ({"weights": "few.safetensors"}, "there are no weights for 'model.embed_tokens.weight'"),
        ({"weights": "config.json"}, "the file cannot be read"),
        ({"tokens": 1}, "model.tokens: samples of 1 token cannot be trained on"),
        ({"tokens": 33}, "model.tokens: samples of 33 tokens are not allowed; give 1 to 32"),
    ],
)
def test_wrong_weights_and_lengths_are_refused(change: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path, LLAMA, 1, **change)
    save_file({"lm_head.weight": torch.zeros(64, 16)}, tmp_path / "wide.safetensors")
    save_file({"lm_head.weight": torch.zeros(64, 32)}, tmp_path / "few.safetensors")
    refused = refusal("run", scenario, "--on-this-device", "--steps", 1)
    assert message in refused


def test_a_family_without_layers_is_refused(tmp_path: Path) -> None:
    bloom = {"model_type": "bloom", "n_layer": 2, "n_head": 2, "hidden_size": 16, "vocab_size": 32}
    scenario = write_scenario(tmp_path, bloom, 1)
    refused = refusal("run", scenario, "--on-this-device", "--steps", 1)
    assert "unknown model_type for training 'bloom'; valid: gpt2, llama, mistral, qwen2, qwen3, vit" in refused


@pytest.mark.slow
def test_without_the_package_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = write_scenario(tmp_path, LLAMA, 1)
    # Each process of the run reads this file. None is how Python marks a package that cannot be imported.
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['transformers'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    finished = ropebridge_process("run", scenario, "--on-this-device", "--steps", 1)
    assert finished.returncode == 2
    assert finished.stderr.startswith("ropebridge: model.huggingface: the package 'transformers' is not installed; pip")


def test_weights_belong_to_a_model_of_transformers(tmp_path: Path) -> None:
    path = write_scenario(tmp_path, LLAMA, 1)
    document = json.loads(path.read_text())
    del document["model"]["huggingface"], document["model"]["tokens"]
    layer = {"name": "a", "parameters": "1 B", "output": "1 B", "activation": "1 B", "forward": "1 FLOP"}
    document["model"] |= {"layers": [layer], "weights": "config.json"}
    path.write_text(json.dumps(document))
    refused = refusal("plan", path)
    assert "model.weights: 'weights' are those of a 'huggingface' model" in refused
