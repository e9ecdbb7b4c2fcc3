"""Ranks hold the layers that they train: a part of a model of transformers has the weights of the whole model."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executor.backend import TorchBackend
from executor.training.models.loading import is_empty, load_model, load_with_sizes
from planner.plan.plan import Plan
from planner.scenario.faults import Absence
from planner.scenario.scenario import WEIGHT_INDEX, HuggingFaceCode
from planner.scenario.training import Optimizer
from tests.executor.training.test_huggingface import assert_equal
from tests.executor.training.test_tensor_parallel import grouped_plan
from tests.helpers.processes.command import ropebridge
from tests.helpers.processes.training import Trained
from tests.helpers.scenarios.huggingface import (
    GPT2,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    VIT,
    huggingface_scenario,
    original_names,
    train_transformers,
    transformers_alone,
    write_scenario,
)
from tests.helpers.strategies.scripted_policy import Scripted
from traces.common.errors import InputError

SEED, LAYERS = 5, 6
FAMILIES = [LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, VIT, {**LLAMA, "pad_token_id": 3}, {**GPT2, "n_embd": 12, "n_head": 3}]


def code_of(config: Mapping[str, Any], path: Path | None = None) -> HuggingFaceCode:
    return HuggingFaceCode(Path("config.json"), config, 10 if config["model_type"] == "vit" else 12, path)


def assert_same(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    assert found.state_dict().keys() == expected.state_dict().keys()
    pairs = [*zip(found.named_parameters(), expected.named_parameters(), strict=True)]
    pairs += [*zip(found.named_buffers(), expected.named_buffers(), strict=True)]
    for (name, own), (other_name, other) in pairs:
        assert name == other_name
        assert torch.equal(own, other), name


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config["model_type"])
@pytest.mark.parametrize("chosen", [(0,), (5,), (2, 3), (0, 5), (), range(LAYERS)], ids=str)
def test_a_part_has_the_random_weights_of_the_whole(config: Mapping[str, Any], chosen: tuple[int, ...]) -> None:
    whole, part = load_model(code_of(config), SEED), load_model(code_of(config), SEED, chosen)
    assert len(part.layers) == LAYERS
    for index, (layer, expected) in enumerate(zip(part.layers, whole.layers, strict=True)):
        if index in chosen:
            assert_same(layer, expected)
        else:
            assert all(each.is_meta for each in layer.parameters())
    held = {index for index, layer in enumerate(part.layers) if not is_empty(layer)}
    assert held == set(chosen)
    assert part.tied == whole.tied


@pytest.mark.parametrize("config", [LLAMA, QWEN2, GPT2, VIT], ids=lambda config: config["model_type"])
def test_layers_that_are_filled_one_after_the_other_have_the_weights_of_the_whole(config: Mapping[str, Any]) -> None:
    loaded, whole = load_with_sizes(code_of(config), SEED, chosen=()), load_model(code_of(config), SEED)
    for index in reversed(range(LAYERS)):
        layer = loaded.model.layers[index]
        assert is_empty(layer)
        loaded.fill(index)
        assert_same(layer, whole.layers[index])


@pytest.mark.parametrize("config", [LLAMA, QWEN2, GPT2, VIT], ids=lambda config: config["model_type"])
def test_a_part_has_the_weights_of_files(config: Mapping[str, Any], tmp_path: Path) -> None:
    model = transformers_alone(config, seed=11)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "several", max_shard_size="30KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    # Names as in files of the model without its head, with buffers that old versions of transformers saved.
    base = {f"h.{layer}.attn.bias": torch.ones(1) for layer in range(4)} if config is GPT2 else {}
    base |= {name.removeprefix(f"{model.base_model_prefix}."): each for name, each in model.state_dict().items()}
    if model.all_tied_weights_keys:
        del base["lm_head.weight"]
    save_file({name: each.contiguous() for name, each in base.items()}, tmp_path / "base.safetensors")
    # A file beside an index that the index does not name.
    save_file({"x": torch.zeros(1)}, tmp_path / "several" / "other.safetensors")
    expected = load_model(code_of(config), seed=11)
    for place in ("one", "one/model.safetensors", "several", f"several/{WEIGHT_INDEX}", "base.safetensors"):
        part, whole = (load_model(code_of(config, tmp_path / place), SEED, chosen) for chosen in ((2, 5), None))
        for index, layer in enumerate(expected.layers):
            assert_same(whole.layers[index], layer)
            if index in (2, 5):
                assert_same(part.layers[index], layer)
            else:
                assert is_empty(part.layers[index])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[]", "the index cannot be read"),
        ('{"weight_map": {"lm_head.weight": "../one.safetensors"}}', "names the file '../one.safetensors', which is"),
        ('{"weight_map": {"lm_head.weight": "gone.safetensors"}}', "names the file 'gone.safetensors', which is not"),
    ],
)
def test_a_wrong_index_is_refused(index: str, message: str, tmp_path: Path) -> None:
    scenario = write_scenario(tmp_path, LLAMA, 1, weights=WEIGHT_INDEX)
    (tmp_path / WEIGHT_INDEX).write_text(index)
    refused = ropebridge("run", scenario, "--on-this-device", "--steps", 1)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert WEIGHT_INDEX in refused.stderr


def test_weights_that_an_index_lacks_are_refused(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(64, 32)}, tmp_path / "one.safetensors")
    (tmp_path / WEIGHT_INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "one.safetensors"}}))
    with pytest.raises(InputError, match=r"there are no weights for 'model\.embed_tokens.weight'"):
        load_model(code_of(LLAMA, tmp_path), SEED, (1,))


# --- layers that change devices ---------------------------------------------------------------------------------


RULE = Optimizer("momentum", learning_rate=0.05)
SINGLE = [(1, 1.0)]


def test_layers_move_to_devices_that_had_no_memory_for_them(tmp_path: Path) -> None:
    scenario = huggingface_scenario(tmp_path, GPT2, 3, RULE)
    first = grouped_plan(scenario, [(2, SINGLE), (4, SINGLE)], (5, 4, 3))
    wider = grouped_plan(scenario, [(3, SINGLE), (1, SINGLE), (2, SINGLE)], (6, 6))
    policy = Scripted({0: wider, 3: first})
    target = tmp_path / "parameters.safetensors"
    backend = TorchBackend("real", on_this_device=True, parameters=target)
    record = backend.run(scenario, first, policy, 8)
    assert len(record.decisions) == 2
    trained = Trained(list(record.losses), original_names(scenario, load_file(target)))
    assert_equal(trained, train_transformers(scenario, GPT2, 8))


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("is_spare", [False, True], ids=["replaced", "spare"])
def test_ranks_that_are_lost_before_any_copy_begin_anew(
    config: Mapping[str, Any], is_spare: bool, tmp_path: Path
) -> None:
    """The layers then have their first weights, although no rank had kept them."""
    scenario = huggingface_scenario(tmp_path, config, 3, RULE)
    devices = scenario.cluster.devices

    def on(*numbers: int) -> Plan:
        some = replace(scenario, cluster=replace(scenario.cluster, devices=tuple(devices[each] for each in numbers)))
        return grouped_plan(some, [(2, SINGLE), (4, SINGLE)], (5, 4, 3))

    faulty = replace(scenario, faults=(Absence("device-1", 0.3, 0.7),))
    policy = Scripted({}, {("device-1",): on(0, 2)}) if is_spare else None
    target = tmp_path / "parameters.safetensors"
    backend = TorchBackend("real", on_this_device=True, backup_every=1000, parameters=target)
    record = backend.run(faulty, on(0, 1), policy, 40)
    trained = Trained(list(record.losses), original_names(scenario, load_file(target)))
    assert_equal(trained, train_transformers(scenario, config, 40))


# --- memory -----------------------------------------------------------------------------------------------------

LARGE = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 14,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "vocab_size": 8192,
    "max_position_embeddings": 64,
}
_PEAK = """
import json, sys
from pathlib import Path
from executor.training.models.loading import load_model, load_with_sizes
from executor.training.parallel_layout import TracingGroup
from executor.training.tensor_parallel import shard_layer
from planner.scenario.scenario import HuggingFaceCode

def kibibytes(name):
    return int(Path("/proc/self/status").read_text().partition(name)[2].split()[0])

config, chosen, degree = map(json.loads, (sys.argv[1], sys.argv[2], sys.argv[4]))
path = Path(sys.argv[3]) if sys.argv[3] else None
load_model(HuggingFaceCode(Path("c"), {**config, "num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 8}, 12), 0)
before = kibibytes("VmRSS:")
code = HuggingFaceCode(Path("c"), config, 12, path)
if degree > 1:
    loaded = load_with_sizes(code, 0, chosen=())
    model = loaded.model
    for index in chosen:
        loaded.fill(index)
        shard_layer(model.layers[index], model.parallel_layout(index), TracingGroup(degree))
else:
    model = load_model(code, 0, chosen)
held = sum(each.nbytes for layer in model.layers for each in layer.parameters() if not each.is_meta)
print(json.dumps([(kibibytes("VmHWM:") - before) * 1024, held]))
"""


def peak_and_held_bytes(chosen: list[int] | None, path: str = "", degree: int = 1) -> list[int]:
    """The growth of a process that builds a model, at its peak, and the bytes of the parameters that it then holds.

    With a ``degree`` above 1 it is one of so many devices of a group, which shards the layers.
    """
    command = [sys.executable, "-c", _PEAK, json.dumps(LARGE), json.dumps(chosen), path, str(degree)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
def test_the_peak_of_a_rank_is_that_of_its_own_part(tmp_path: Path) -> None:
    whole_peak, whole = peak_and_held_bytes(None)
    assert whole_peak > 0.9 * whole
    largest = 8192 * 512 * 4
    transformers_alone(LARGE, 0).save_pretrained(tmp_path / "weights", max_shard_size="50MB")
    for chosen in ([0, 1, 2, 3], [8, 9, 10, 11]):
        for path in ("", str(tmp_path / "weights")):
            peak, own = peak_and_held_bytes(chosen, path)
            assert own < 0.35 * whole
            # Besides its own layers a matrix of numbers, or the pages of a file while they are copied.
            assert peak < own + 3 * largest
            assert peak < 0.5 * whole_peak


@pytest.mark.slow
def test_the_peak_of_a_device_of_a_group_is_that_of_its_shards(tmp_path: Path) -> None:
    layers = list(range(16))
    _, whole = peak_and_held_bytes(None)
    transformers_alone(LARGE, 0).save_pretrained(tmp_path / "weights", max_shard_size="50MB")
    for path in ("", str(tmp_path / "weights")):
        peak, own = peak_and_held_bytes(layers, path, degree=4)
        assert own < 0.26 * whole
        # Besides its shards a whole layer, and as above.
        assert peak < own + 4 * 8192 * 512 * 4
