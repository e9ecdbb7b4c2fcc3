"""The noise of the gradient, measured by ranks with unequal batches: what one process finds for the same samples."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from executor.backend import TorchBackend
from executor.control.results import gather_norms
from executor.core.job import JobFolder
from executor.training.models.loading import load_model
from executor.training.noise_scale import write_norms
from experiments.runs.folder import read_record, summarise, write_record
from planner.adapt.gradient_noise import ESTIMATORS, GradientNorms, LocalNorms, smoothed_noise
from planner.plan.plan import Synchronisation
from planner.scenario.scenario import Scenario
from tests.helpers.processes.training import GPT, hybrid_plan, training_scenario

STEPS = 4

# Small enough that gradients are scaled down: the norms are those from before.
CLIP_NORM = 0.5

# Of the 12 samples of a step, by device: microbatches of 5 and 4, of which two replicas take 1 and 3 parts, as whole
# samples; and a pipeline of 3.
SAMPLES = ((0, 5), (1, 2, 3, 4, 6, 7, 8), (9, 10, 11))


@pytest.mark.parametrize("bucket_bytes", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_ranks_with_unequal_batches_measure_the_norms_of_their_samples(bucket_bytes: int, tmp_path: Path) -> None:
    """With buckets, sums begin while other gradients are still to come."""
    plain = training_scenario(GPT, 3)
    scenario = replace(plain, training=replace(plain.training, noise_scale=True, clip_norm=CLIP_NORM))
    plan = hybrid_plan(scenario, "1f1b", [([(6, [1.0, 3.0])], [5, 4]), ([(6, [1.0])], [3])])
    plan = replace(plan, synchronisation=Synchronisation(bucket_bytes=bucket_bytes))
    record = TorchBackend("real").run(scenario, plan, None, STEPS)
    expected = norms_in_one_process(scenario)
    assert [norms.step for norms in record.gradient_norms] == list(range(STEPS))
    for found, wanted in zip(record.gradient_norms, expected, strict=True):
        assert found.batch_sizes == wanted.batch_sizes == (2, 7, 3)
        np.testing.assert_allclose(found.local_squared_norms, wanted.local_squared_norms, rtol=1e-5)
        np.testing.assert_allclose(found.global_squared_norm, wanted.global_squared_norm, rtol=1e-5)
        assert found.global_squared_norm > CLIP_NORM**2
    write_record(record, tmp_path / "run")
    assert read_record(tmp_path / "run").gradient_norms == record.gradient_norms
    lines = [json.loads(line) for line in (tmp_path / "run" / "gradient-noise.jsonl").read_text().splitlines()]
    for name in ESTIMATORS:
        smoothed = smoothed_noise(record.gradient_norms, name)
        assert smoothed is not None
        assert summarise(record)["gradient_noise_scale"][name] == pytest.approx(smoothed.noise_scale)
        estimates = [asdict(norms.estimate(name)) for norms in record.gradient_norms]
        assert [line["estimates"][name] for line in lines] == estimates


def norms_in_one_process(scenario: Scenario) -> list[GradientNorms]:
    """Each device's gradient from its samples alone, and training on their weighted sum."""
    assert scenario.code is not None
    training = scenario.training
    model = load_model(scenario.code, training.seed)
    layers = nn.Sequential(*model.layers)
    parameters = list(layers.parameters())
    rule = training.optimizer
    optimizer = torch.optim.SGD(parameters, rule.learning_rate, rule.momentum)
    steps = []
    for step in range(STEPS):
        inputs, targets = model.samples(step * training.global_batch, training.global_batch)
        local = []
        for own in SAMPLES:
            index = torch.tensor(own)
            loss = model.loss(layers(inputs[index]), targets[index])
            local.append(torch.autograd.grad(loss, parameters))
        for parameter, *parts in zip(parameters, *local, strict=True):
            weights = [len(own) / training.global_batch for own in SAMPLES]
            parameter.grad = sum(weight * part for weight, part in zip(weights, parts, strict=True))
        whole = squared_norm([parameter.grad for parameter in parameters])
        steps.append(GradientNorms(step, tuple(map(len, SAMPLES)), tuple(map(squared_norm, local)), whole))
        nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
    return steps


def squared_norm(gradients: list) -> float:
    return float(sum((gradient.double() ** 2).sum() for gradient in gradients))


def test_a_device_that_took_no_sample_of_a_step_is_no_part_of_it(tmp_path: Path) -> None:
    job = JobFolder(tmp_path)
    write_norms([LocalNorms(0, 2, 3.0, 1.0), LocalNorms(1, 2, 5.0, 2.0)], job, 0)
    write_norms([LocalNorms(0, 1, 4.0, 1.0)], job, 1)
    write_norms([LocalNorms(0, 3, 6.0, 1.0), LocalNorms(1, 4, 7.0, 2.0), LocalNorms(2, 6, 7.0, 7.0)], job, 3)
    assert gather_norms(job, 4) == (
        GradientNorms(0, (2, 1, 3), (3.0, 4.0, 6.0), 1.0),
        GradientNorms(1, (2, 4), (5.0, 7.0), 2.0),
    )
