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
        self.layers = [index for index, layer in enumerate(self.common) if list(layer.parameters())]
        self._momentum = {
            layer: [torch.zeros_like(each) for each in self.common[layer].parameters()] for layer in self.layers
        }
        # By layer the samples of each worker in each outer step; by worker and layer the version that answers what was
        # sent last, None before there is one.
        self._merged: dict[int, list[dict[int, int]]] = {layer: [] for layer in self.layers}
        self._answers: dict[tuple[int, int], int | None] = {}
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
            self._answers[w, layer] = None
            self.sent[w, layer] = [there - here for there, here in pairs], steps * self._plan.pipelines[w].samples

    def merge(self, workers: Sequence[int], layers: Sequence[int]) -> None:
        """Outer steps with what these workers have sent."""
        for layer in layers:
            parts = [self.sent.pop((w, layer)) for w in workers]
            total = sum(samples for _, samples in parts)
            self._merged[layer].append({w: samples for w, (_, samples) in zip(workers, parts, strict=True)})
            share, momentum = self._share(layer), self._outer.momentum
            with torch.no_grad():
                for index, parameter in enumerate(self.common[layer].parameters()):
                    mean = torch.stack([values[index] * (samples / total) for values, samples in parts]).sum(dim=0)
                    kept = self._momentum[layer][index]
                    parameter -= self._outer.learning_rate * _move(kept, mean, momentum, share)
            self.version[layer] += 1
            for w in workers:
                self._answers[w, layer] = self.version[layer]
            self._versions[layer, self.version[layer]] = self._of(self.common, layer)

    def _share(self, layer: int) -> float:
        """What the last outer step has, of that and the last of each other worker since each in it was merged."""
        *before, last = self._merged[layer]
        share = 0.0
        for w, samples in last.items():
            since = next((place + 1 for place in reversed(range(len(before))) if w in before[place]), 0)
            others: dict[int, int] = {}
            for merged in before[since:]:
                others |= {other: count for other, count in merged.items() if other not in last}
            share += samples / (sum(last.values()) + sum(others.values()))
        return share

    def take(self, w: int, layer: int, version: int) -> None:
        """A worker takes a version over, and mixes it with its own if it answers what was sent last."""
        mixing, answer = self._outer.mixing, self._answers.get((w, layer))
        is_answer = answer is not None and answer <= version
        if is_answer:
            del self._answers[w, layer]
        with torch.no_grad():
            own, before = self.workers[w][layer].parameters(), self._versions[layer, self._base[w, layer]]
            for parameter, new, old in zip(own, self._versions[layer, version], before, strict=True):
                parameter.copy_(mixing * parameter + (1 - mixing) * new if is_answer else parameter + (new - old))
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


def _move(kept: torch.Tensor, mean: torch.Tensor, momentum: float, share: float) -> torch.Tensor:
    """The way of a part of an outer step, in units of the learning rate, after which ``kept`` is its momentum.

    Outer steps with one mean approach a steady motion: the difference to it shrinks by the momentum in each whole one,
    by as much of it as the share in a part.
    """
    steady = mean / (1 - momentum)
    shrunk = (kept - steady) * momentum**share
    # Summed over whole outer steps from here on, and from the end of this part on.
    way = share * steady + momentum**2 * ((kept - steady) - shrunk) / (1 - momentum)
    kept.copy_(steady + shrunk)
    return way
