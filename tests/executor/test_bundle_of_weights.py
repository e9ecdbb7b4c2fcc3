"""The job's folder of a model of transformers: its configuration is in the scenario, its weights are copied."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from executor.core.hosts import Hosts
from executor.deploy.bundle import HostedRun
from executor.deploy.deployment import Bundle, read_bundle
from planner.scenario.scenario import HuggingFaceCode, Scenario
from planner.systems.registry import make_plan
from tests.helpers.scenarios.huggingface import LLAMA, huggingface_scenario

RUN = HostedRun("real", 2, "none", 0, "", 0)


def bundled(scenario: Scenario, folder: Path) -> Bundle:
    plan = make_plan("megatron", scenario)
    Bundle(scenario, plan, RUN, Hosts("host", "", 29400, 10.0, 5.0, (), b"key")).write(folder)
    return read_bundle(folder)


def test_random_weights_need_no_file(tmp_path: Path) -> None:
    scenario = huggingface_scenario(tmp_path, LLAMA, 2)
    found = bundled(scenario, tmp_path / "job")
    assert found.scenario.code == scenario.code
    assert isinstance(found.scenario.code, HuggingFaceCode)
    assert found.scenario.code.config == LLAMA
    assert found.code is None


def test_a_folder_of_weights_and_a_single_file_are_copied(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    for name in ("first", "second"):
        save_file({"x": torch.zeros(1)}, tmp_path / "weights" / f"{name}.safetensors")
    for number, weights in enumerate(("weights", "weights/first.safetensors")):
        scenario = huggingface_scenario(tmp_path, LLAMA, 2, weights=weights)
        job = tmp_path / f"job-{number}"
        found = bundled(scenario, job)
        assert found.code == job / "weights"
        copies = ["first.safetensors", "second.safetensors"] if number == 0 else []
        assert sorted(path.name for path in job.glob("weights/*")) == copies
