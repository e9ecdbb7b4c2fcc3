"""The loss of a model on samples that no step of a run has had."""

from collections.abc import Mapping

import torch

from executor.training.data.order import DataOrder
from executor.training.models.loading import load_with_sizes
from planner.scenario.scenario import Scenario


class UnseenSamples:
    """Samples of a scenario's training data, and its model to compute their loss with.

    Of a finite data set whose samples a run has had before, they are those that would come next.

    Args:
        scenario: The scenario, whose model has code.
        first: Position of the first sample; see `executor.training.data.order`.
        count: Number of samples.
    """

    def __init__(self, scenario: Scenario, first: int, count: int) -> None:
        training = scenario.training
        assert scenario.code is not None, "the model is trained"
        loaded = load_with_sizes(scenario.code, training.seed, training.precision, training.data)
        self._model = loaded.model
        self._batch, self._samples = training.global_batch, DataOrder(loaded.data, training.seed).samples(first, count)

    def loss(self, parameters: Mapping[str, torch.Tensor]) -> float:
        """Return the mean loss with these parameters, by the names ``LAYER.PARAMETER``, a batch at a time."""
        layers = torch.nn.Sequential(*self._model.layers)
        # Buffers keep their first values, which are not among a run's parameters.
        layers.load_state_dict(dict(parameters), strict=False)
        total = 0.0
        with torch.no_grad():
            for inputs, targets in zip(*(torch.split(each, self._batch) for each in self._samples), strict=True):
                total += len(inputs) * float(self._model.loss(layers(inputs), targets))
        return total / len(self._samples[0])
