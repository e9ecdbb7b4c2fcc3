"""The noise scale of a real model's gradients: what steps say against what all samples say."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from executor.training.models.loading import TrainableModel, load_model
from planner.adapt.gradient_noise import ESTIMATORS
from tests.helpers.processes.training import GPT

SAMPLES, STEPS = 48, 125
BATCHES = (2, 5, 9)

Row = NDArray[np.float64]


def gradient(model: TrainableModel, inputs: torch.Tensor, targets: torch.Tensor) -> Row:
    """Of the mean loss of these samples, all parameters in one row."""
    outputs = inputs
    for layer in model.layers:
        outputs = layer(outputs)
    parameters = [parameter for layer in model.layers for parameter in layer.parameters()]
    parts = torch.autograd.grad(model.loss(outputs, targets), parameters)
    return torch.cat([part.flatten() for part in parts]).double().numpy()


@cache
def measured() -> tuple[tuple[float, float], Row, Row]:
    """S and |G|² of the data, and |g_i|² and |g|² of steps that draw their samples from it with replacement."""
    threads = torch.get_num_threads()
    # Several threads wait for each other on a busy machine, for longer than layers this small take.
    torch.set_num_threads(1)
    model = load_model(GPT, seed=0)
    inputs, targets = model.samples(0, SAMPLES)
    each = np.stack(
        [gradient(model, inputs[index : index + 1], targets[index : index + 1]) for index in range(SAMPLES)]
    )
    mean = each.mean(axis=0)
    truth = (float(((each - mean) ** 2).sum(axis=1).mean()), float(mean @ mean))

    random = np.random.default_rng(0)
    local, whole = np.empty((STEPS, len(BATCHES))), np.empty(STEPS)
    for step in range(STEPS):
        drawn = torch.from_numpy(random.integers(SAMPLES, size=sum(BATCHES)))
        gradients = np.stack([gradient(model, inputs[part], targets[part]) for part in drawn.split(BATCHES)])
        local[step] = (gradients**2).sum(axis=1)
        whole[step] = (np.average(gradients, axis=0, weights=BATCHES) ** 2).sum()
    torch.set_num_threads(threads)
    return truth, local, whole


@pytest.mark.parametrize("name", ["minimum-variance", pytest.param("released", marks=pytest.mark.slow)])
def test_unequal_batches_of_real_gradients_give_the_noise_scale_of_the_data(name: str) -> None:
    (variance, squared_gradient), local, whole = measured()
    weights = ESTIMATORS[name](BATCHES)
    found = (weights.variance(local, whole), weights.squared_gradient(local, whole))
    for estimates, expected in zip(found, (variance, squared_gradient), strict=True):
        standard_error = estimates.std(ddof=1) / math.sqrt(STEPS)
        assert abs(estimates.mean() - expected) < 4 * standard_error
        # Many steps, or the bar would let anything pass.
        assert standard_error < 0.1 * expected
