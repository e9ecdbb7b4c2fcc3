"""A model of transformers trains over pipelines, replicas and tensor-parallel groups as transformers alone does."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from executor.backend import TorchBackend
from planner.plan.plan import Plan, Synchronisation
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer, TokenFiles, TrainingData
from tests.executor.training.test_tensor_parallel import grouped_plan
from tests.helpers.processes.token_files import tokens_of, write_tokens
from tests.helpers.processes.training import Trained, hybrid_plan, placed_plan
from tests.helpers.scenarios.huggingface import (
    GPT2,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    TOKENS,
    VIT,
    huggingface_scenario,
    original_names,
    train_transformers,
    transformers_alone,
)
from traces.common.errors import InputError

STEPS = 3
# Sums have another order than in one process; losses differed by 2.4e-7 and parameters by 1.4e-7 at most (four plans).
TOLERANCE = 1e-5

# AdamW divides by the size of a gradient, and so makes large what rounding changes in one near zero.
RULE = Optimizer("momentum", learning_rate=0.5)
SINGLE, PAIR = [(1, 1.0)], [(2, 1.0)]


def train(scenario: Scenario, plan: Plan, folder: Path, steps: int = STEPS) -> Trained:
    target = folder / "parameters.safetensors"
    record = TorchBackend("real", parameters=target, on_this_device=True).run(scenario, plan, None, steps)
    return Trained(list(record.losses), original_names(scenario, load_file(target)))


def assert_equal(trained: Trained, expected: Trained) -> None:
    near = {"rtol": TOLERANCE, "atol": TOLERANCE}
    torch.testing.assert_close(torch.tensor(trained.losses), torch.tensor(expected.losses), **near)
    assert trained.parameters.keys() == expected.parameters.keys()
    torch.testing.assert_close(dict(trained.parameters), dict(expected.parameters), **near)


@pytest.mark.parametrize(
    ("config", "stages"),
    [
        pytest.param(LLAMA, [(6, SINGLE)], id="llama-1", marks=pytest.mark.slow),
        pytest.param(LLAMA, [(3, SINGLE), (3, SINGLE)], id="llama-pipeline", marks=pytest.mark.slow),
        pytest.param(LLAMA, [(6, PAIR)], id="llama-tensor", marks=pytest.mark.slow),
        pytest.param(LLAMA, [(3, PAIR), (3, PAIR)], id="llama-both"),
        pytest.param(GPT2, [(6, SINGLE)], id="gpt2-1", marks=pytest.mark.slow),
        pytest.param(GPT2, [(2, SINGLE), (4, SINGLE)], id="gpt2-pipeline"),
        pytest.param(GPT2, [(6, PAIR)], id="gpt2-tensor", marks=pytest.mark.slow),
        pytest.param(GPT2, [(3, PAIR), (3, PAIR)], id="gpt2-both", marks=pytest.mark.slow),
        pytest.param(MISTRAL, [(2, SINGLE), (4, SINGLE)], id="mistral-pipeline", marks=pytest.mark.slow),
        pytest.param(MISTRAL, [(3, PAIR), (3, PAIR)], id="mistral-both", marks=pytest.mark.slow),
        pytest.param(QWEN2, [(2, SINGLE), (4, SINGLE)], id="qwen2-pipeline", marks=pytest.mark.slow),
        pytest.param(QWEN2, [(3, PAIR), (3, PAIR)], id="qwen2-both", marks=pytest.mark.slow),
        # Tables that two devices cannot divide stay whole.
        pytest.param({**GPT2, "vocab_size": 63}, [(6, PAIR)], id="gpt2-odd-vocabulary", marks=pytest.mark.slow),
        pytest.param(VIT, [(2, SINGLE), (4, SINGLE)], id="vit-pipeline", marks=pytest.mark.slow),
        pytest.param(VIT, [(6, PAIR)], id="vit-tensor", marks=pytest.mark.slow),
        pytest.param(VIT, [(2, SINGLE), (4, PAIR)], id="vit-both", marks=pytest.mark.slow),
        pytest.param(QWEN3, [(2, SINGLE), (2, SINGLE), (2, SINGLE)], id="qwen3-pipeline", marks=pytest.mark.slow),
        pytest.param(QWEN3, [(3, PAIR), (3, PAIR)], id="qwen3-both", marks=pytest.mark.slow),
    ],
)
def test_stages_and_groups(config: Mapping[str, Any], stages: list, tmp_path: Path) -> None:
    ranks = sum(degree for _, replicas in stages for degree, _ in replicas)
    scenario = huggingface_scenario(tmp_path, config, ranks, RULE)
    plan = grouped_plan(scenario, stages, (5, 4, 3))
    assert_equal(train(scenario, plan, tmp_path), train_transformers(scenario, config, STEPS))


@pytest.mark.parametrize(
    ("config", "stages"),
    [
        pytest.param(LLAMA, [(6, SINGLE)], id="llama-1", marks=pytest.mark.slow),
        pytest.param(LLAMA, [(3, SINGLE), (3, SINGLE)], id="llama-pipeline", marks=pytest.mark.slow),
        pytest.param(LLAMA, [(6, PAIR)], id="llama-tensor", marks=pytest.mark.slow),
        pytest.param(LLAMA, [(3, PAIR), (3, PAIR)], id="llama-both", marks=pytest.mark.slow),
        pytest.param(GPT2, [(6, SINGLE)], id="gpt2-1", marks=pytest.mark.slow),
        pytest.param(GPT2, [(3, SINGLE), (3, SINGLE)], id="gpt2-pipeline", marks=pytest.mark.slow),
        pytest.param(GPT2, [(6, PAIR)], id="gpt2-tensor", marks=pytest.mark.slow),
        pytest.param(GPT2, [(3, PAIR), (3, PAIR)], id="gpt2-both"),
        pytest.param(GPT2, [(6, [(4, 1.0)])], id="gpt2-tensor-of-4", marks=pytest.mark.slow),
    ],
)
def test_gradients(config: Mapping[str, Any], stages: list, tmp_path: Path) -> None:
    """A step of plain gradient descent at rate 1 subtracts the gradient."""
    ranks = sum(degree for _, replicas in stages for degree, _ in replicas)
    scenario = huggingface_scenario(tmp_path, config, ranks, Optimizer("sgd", learning_rate=1.0))
    trained = train(scenario, grouped_plan(scenario, stages, (5, 4, 3)), tmp_path, steps=1)
    model = transformers_alone(config, scenario.training.seed)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train_transformers(scenario, config, 1, model)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    assert gradients.keys() == trained.parameters.keys()
    for name, gradient in gradients.items():
        assert gradient is not None
        assert gradient.abs().max() > 100 * TOLERANCE
        found = before[name] - trained.parameters[name]
        torch.testing.assert_close(found, gradient, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_parameters_move_by_more_than_the_tolerance(config: Mapping[str, Any], tmp_path: Path) -> None:
    scenario = huggingface_scenario(tmp_path, config, 1, RULE)
    before = train_transformers(scenario, config, 0).parameters
    after = train_transformers(scenario, config, STEPS).parameters
    assert all((after[name] - value).abs().max() > 30 * TOLERANCE for name, value in before.items())


def test_tokens_of_files_are_trained_on(tmp_path: Path) -> None:
    scenario = huggingface_scenario(tmp_path, LLAMA, 4, RULE)
    folder = write_tokens(tmp_path / "tokens", [tokens_of(seed, 700) for seed in range(2)])
    data = TrainingData(TokenFiles(folder, length=8))
    scenario = replace(scenario, training=replace(scenario.training, data=data))
    plan = grouped_plan(scenario, [(3, PAIR), (3, PAIR)], (5, 4, 3))
    # Files have samples of another length than the model was planned for.
    with pytest.raises(InputError, match="bytes of output for one sample"):
        train(scenario, plan, tmp_path)
    scenario = replace(scenario, training=replace(scenario.training, data=TrainingData(TokenFiles(folder, TOKENS))))
    assert_equal(train(scenario, plan, tmp_path), train_transformers(scenario, LLAMA, STEPS))


# --- a table at both ends of a pipeline -------------------------------------------------------------------------


def tied_plan(scenario: Scenario, name: str) -> Plan:
    """Plans that have the two copies of the table on one device, on two, or on more, by name."""
    if name == "replicas-at-both-ends":
        return hybrid_plan(scenario, "1f1b", [([(2, [1.0, 2.0]), (4, [1.0])], [5, 4, 3])])
    if name == "unlike-pipelines":
        return hybrid_plan(scenario, "1f1b", [([(2, [1.0]), (4, [1.0])], [3, 4]), ([(6, [1.0])], [5])])
    if name == "both-ends-on-one-device":
        return placed_plan(scenario, "zb-v", [(2, 0), (1, 1), (2, 1), (1, 0)], [[1.0], [1.0]], [5, 4, 3])
    if name == "both-ends-on-replicas":
        return placed_plan(scenario, "zb-v", [(2, 0), (1, 1), (2, 1), (1, 0)], [[1.0, 2.0], [1.0]], [5, 4, 3])
    assert name == "buckets"
    plan = hybrid_plan(scenario, "1f1b", [([(6, [1.0, 2.0])], [6, 6])])
    return replace(plan, synchronisation=Synchronisation(bucket_bytes=20_000))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("unlike-pipelines", marks=pytest.mark.slow),
        "both-ends-on-replicas",
        pytest.param("replicas-at-both-ends", marks=pytest.mark.slow),
        pytest.param("both-ends-on-one-device", marks=pytest.mark.slow),
        pytest.param("buckets", marks=pytest.mark.slow),
    ],
)
def test_tied_embeddings(name: str, tmp_path: Path) -> None:
    ranks = 2 if name in ("both-ends-on-one-device", "buckets") else 3
    # Clipping by a norm in which the table counts once.
    scenario = huggingface_scenario(tmp_path, GPT2, ranks, RULE, clip_norm=0.5)
    expected = train_transformers(scenario, GPT2, STEPS)
    assert_equal(train(scenario, tied_plan(scenario, name), tmp_path), expected)


def refusal(scenario: Scenario, plan: Plan) -> InputError:
    with pytest.raises(InputError) as caught:
        TorchBackend("real", on_this_device=True).run(scenario, plan, None, STEPS)
    return caught.value


def test_what_would_sum_the_copies_wrongly_is_refused(tmp_path: Path) -> None:
    scenario = huggingface_scenario(tmp_path, GPT2, 3)
    refused = refusal(scenario, grouped_plan(scenario, [(2, SINGLE), (4, PAIR)], (12,)))
    assert "2 devices share tied layers, but 1 devices share them in pipelines[0].stages[0].replicas[0]" in str(refused)
    plan = hybrid_plan(scenario, "1f1b", [([(2, [1.0]), (4, [1.0])], [6]), ([(6, [1.0])], [6])])
    refused = refusal(scenario, replace(plan, synchronisation=Synchronisation("asgd")))
    assert "method 'asgd' cannot train a model whose layers share parameters" in str(refused)


def test_a_profile_that_ties_other_layers_is_refused(tmp_path: Path) -> None:
    scenario = huggingface_scenario(tmp_path, GPT2, 2)
    first, *others = scenario.model.layers
    model = replace(scenario.model, layers=(replace(first, tied_bytes=0), *others))
    plan = grouped_plan(scenario, [(2, SINGLE), (4, SINGLE)], (12,))
    assert "layer 0 has 8192 bytes of tied parameters" in str(refusal(replace(scenario, model=model), plan))
