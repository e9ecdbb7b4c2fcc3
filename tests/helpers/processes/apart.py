"""Decoupled DiLoCo in one process, with torch's optimizers, told what happens when: what both steps must equal."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from executor.training.models.loading import load_model
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from tests.helpers.processes.training import optimizer_of, samples_at


class Apart:
    """Workers and the common parameters, for given layers at a time."""

    def __init__(self, scenario: Scenario, plan: Plan) -> None:
        assert scenario.code is not None
        self._training, self._plan = scenario.training, plan
        self._outer = plan.synchronisation.outer
        self._model = load_model(scenario.code, scenario.training.seed)
        self.common = nn.Sequential(*self._model.layers)
        self.workers = [copy.deepcopy(self.common) for _ in plan.pipelines]
        self._inner = [optimizer_of(self._training.optimizer, worker) for worker in self.workers]
        settings = {"lr": self._outer.learning_rate, "momentum": self._outer.momentum}
        self._move = {
            index: torch.optim.SGD(layer.parameters(), nesterov=self._outer.momentum > 0, **settings)
            for index, layer in enumerate(self.common)
            if list(layer.parameters())
        }
        self.layers = sorted(self._move)
        self.version = dict.fromkeys(self.layers, 0)
        self._versions = {(layer, 0): self._of(self.common, layer) for layer in self.layers}
        self._base = {(w, layer): 0 for w in range(len(self.workers)) for layer in self.layers}
        self._counted = dict.fromkeys(self._base, 0)
        self.steps = [0] * len(self.workers)
        self.sent: dict[tuple[int, int], tuple[list[torch.Tensor], int]] = {}

    def train(self, w: int) -> None:
        """A worker takes a step."""
        plan, worker = self._plan, self.workers[w]
        first = self.steps[w] * plan.global_batch + sum(pipeline.samples for pipeline in plan.pipelines[:w])
        inputs, targets = samples_at(self._model, first, plan.pipelines[w].samples, self._training)
        self._inner[w].zero_grad()
        self._model.loss(worker(inputs), targets).backward()
        self._inner[w].step()
        self.steps[w] += 1

    def send(self, w: int, layers: Sequence[int]) -> None:
        """A worker sends its pseudo-gradients."""
        for layer in layers:
            base = self._versions[layer, self._base[w, layer]]
            pairs = zip(base, self._of(self.workers[w], layer), strict=True)
            steps = self.steps[w] - self._counted[w, layer]
            self._counted[w, layer] = self.steps[w]
            self.sent[w, layer] = [there - here for there, here in pairs], steps * self._plan.pipelines[w].samples

    def merge(self, workers: Sequence[int], layers: Sequence[int]) -> None:
        """Outer steps with what these workers have sent."""
        for layer in layers:
            parts = [self.sent.pop((w, layer)) for w in workers]
            total = sum(samples for _, samples in parts)
            for index, parameter in enumerate(self.common[layer].parameters()):
                weighted = [values[index] * (samples / total) for values, samples in parts]
                parameter.grad = torch.stack(weighted).sum(dim=0)
            self._move[layer].step()
            self.version[layer] += 1
            self._versions[layer, self.version[layer]] = self._of(self.common, layer)

    def take(self, w: int, layer: int, version: int) -> None:
        """A worker takes a version over."""
        mixing = self._outer.mixing
        with torch.no_grad():
            own = self.workers[w][layer].parameters()
            for parameter, new in zip(own, self._versions[layer, version], strict=True):
                parameter.copy_(mixing * parameter + (1 - mixing) * new)
        self._base[w, layer] = version

    def _of(self, model: nn.Sequential, layer: int) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in model[layer].parameters()]

    def parameters(self, w: int) -> dict[str, torch.Tensor]:
        """A worker's parameters."""
        return {name: each.detach() for name, each in self.workers[w].named_parameters()}

    @property
    def common_parameters(self) -> dict[str, torch.Tensor]:
        """What the outer steps have made."""
        return {name: each.detach() for name, each in self.common.named_parameters()}
