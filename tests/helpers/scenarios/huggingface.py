"""Small models of transformers in scenarios, and the oracle: transformers alone in one process.

transformers is loaded when it is used: every process that collects the tests would take seconds for it.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from executor.training.data.order import EndlessData
from executor.training.models.loading import load_for_checks, load_model
from planner.files.scenario import read_scenario
from planner.scenario.scenario import Scenario
from planner.scenario.training import Optimizer
from tests.helpers.processes.training import Trained

TOKENS = 12

_ROTARY = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    # Larger than usual, so that all parameters learn within a few steps.
    "initializer_range": 0.1,
}
LLAMA = {"model_type": "llama", **_ROTARY}
MISTRAL = {"model_type": "mistral", **_ROTARY, "sliding_window": 5}
QWEN2 = {"model_type": "qwen2", **_ROTARY, "tie_word_embeddings": True}
QWEN3 = {"model_type": "qwen3", **_ROTARY, "head_dim": 8, "tie_word_embeddings": True}
# Dropout draws other random numbers in every process.
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 64,
    "initializer_range": 0.1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


VIT = {
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 12,
    "patch_size": 4,
    "id2label": {str(label): f"label {label}" for label in range(5)},
    "initializer_range": 0.1,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def write_scenario(folder: Path, config: Mapping[str, Any], devices: int, **model: Any) -> Path:
    """Write a scenario with a model of transformers on the devices of one host, and return its path."""
    (folder / "config.json").write_text(json.dumps(config))
    # Nine patches and the class token.
    tokens = 10 if config["model_type"] == "vit" else TOKENS
    document = {
        "name": "small",
        "cluster": {
            "devices": [
                {"name": f"device-{number}", "kind": "raspberry-pi-4", "region": "here", "host": "host"}
                for number in range(devices)
            ],
            "links": [{"inside": "host", "bandwidth": "1 Gbit/s", "latency": "0 s"}],
        },
        "model": {"name": "small", "huggingface": "config.json", "tokens": tokens, **model},
        "training": {"global_batch": 12, "seed": 3, "optimizer": {"name": "momentum", "learning_rate": 0.1}},
    }
    path = folder / "scenario.yaml"
    path.write_text(json.dumps(document))
    return path


def huggingface_scenario(
    folder: Path,
    config: Mapping[str, Any],
    devices: int,
    optimizer: Optimizer | None = None,
    clip_norm: float | None = None,
    **model: Any,
) -> Scenario:
    """The scenario of `write_scenario` with another optimizer and clipping."""
    scenario = read_scenario(write_scenario(folder, config, devices, **model))
    rule = optimizer or scenario.training.optimizer
    return replace(scenario, training=replace(scenario.training, optimizer=rule, clip_norm=clip_norm))


def transformers_alone(config: Mapping[str, Any], seed: int) -> Any:
    """The model with the random weights that transformers draws after this seed."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(seed)
    import transformers

    made = transformers.AutoConfig.for_model(config["model_type"], **values)
    if config["model_type"] == "vit":
        return transformers.AutoModelForImageClassification.from_config(made)
    return transformers.AutoModelForCausalLM.from_config(made)


def train_transformers(scenario: Scenario, config: Mapping[str, Any], steps: int, model: Any = None) -> Trained:
    """Train by transformers' own loss on whole batches; parameters have transformers' names, and ties none twice."""
    training = scenario.training
    model = transformers_alone(config, training.seed) if model is None else model
    rule = training.optimizer
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=rule.learning_rate, momentum=rule.momentum)
    if rule.name == "adamw":
        optimizer = torch.optim.AdamW(parameters, lr=rule.learning_rate, weight_decay=rule.weight_decay)
    losses = []
    assert scenario.code is not None
    data = load_for_checks(scenario.code, training.seed, named=training.data).data
    assert isinstance(data, EndlessData)
    for step in range(steps):
        inputs, targets = data.samples(step * training.global_batch, training.global_batch)
        optimizer.zero_grad()
        if training.data is not None:
            loss = functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        else:
            # transformers shifts the labels of a language model itself.
            loss = model(inputs, labels=inputs if targets.ndim > 1 else targets).loss
        loss.backward()
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, training.clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(losses, {name: value.detach() for name, value in model.state_dict().items()})


def original_names(scenario: Scenario, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of a run, by transformers' names."""
    assert scenario.code is not None
    model = load_model(scenario.code, scenario.training.seed)
    from executor.training.models.huggingface import TransformersModel

    assert isinstance(model, TransformersModel)
    return model.original(parameters)
