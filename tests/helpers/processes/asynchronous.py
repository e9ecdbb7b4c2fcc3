"""Pipelines that send each other updates without waiting: the recursion they must follow, written down once more."""

import copy
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from executor.training.models.loading import load_model
from executor.training.models.trainable import TrainableModel
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from tests.helpers.processes.training import regional_batch, samples_at

Numbers = list[torch.Tensor]


@dataclass
class _Pipeline:
    layers: nn.Sequential
    step: int = 0
    # Number of updates sent, and of steps since the last one.
    sent: int = 0
    since: int = 0
    # By sender: what has arrived, and is not applied yet; with the number of its exchange.
    arrived: dict[int, list[tuple[int, Numbers]]] = field(default_factory=dict)
    own_sum: Numbers | None = None


class Recursion:
    """Plain SGD of several pipelines, one after another in this process; the test says what happens when.

    Pipeline p's step k, from parameters w, with the gradient g of its own samples' part of the mean loss:

    - asgd, asgd-ga(f): w <- w - rate * clip(g + everything that has arrived); after every f-th step the sum of f of
      its g goes out.
    - ma(f), g being that of the mean loss of its own samples: w <- w + sum over senders of (their newest - w) / P;
      w <- w - rate * clip(g); after every f-th step w goes out.

    With a staleness bound of 0 a step applies what was sent before the sender's step of the same number. An update also
    goes out before each step of ``settlements``, where the test calls `settle`, and before each step of ``changes``,
    from which on there are as many steps between updates.
    """

    def __init__(
        self,
        scenario: Scenario,
        plan: Plan,
        settlements: Collection[int] = (),
        changes: Mapping[int, int] | None = None,
    ) -> None:
        assert scenario.code is not None
        self._settlements, self._changes = settlements, changes or {}
        self.model: TrainableModel = load_model(scenario.code, scenario.training.seed)
        self._scenario, self._training, self._plan = scenario, scenario.training, plan
        layers = nn.Sequential(*self.model.layers)
        self.pipelines = [_Pipeline(copy.deepcopy(layers)) for _ in plan.pipelines]
        self.losses: list[float] = []
        count = len(plan.pipelines)
        pairs = [(p, q) for p in range(count) for q in range(count) if p != q]
        self.in_the_air: dict[tuple[int, int], deque[tuple[int, Numbers]]] = {pair: deque() for pair in pairs}

    def deliver(self, sender: int, receiver: int) -> None:
        """The next update from one pipeline to another arrives."""
        update = self.in_the_air[sender, receiver].popleft()
        self.pipelines[receiver].arrived.setdefault(sender, []).append(update)

    def step(self, p: int) -> None:
        """A pipeline carries out its next step."""
        own, how = self.pipelines[p], self._plan.synchronisation
        arrived = self._take(own, own.sent if how.staleness_bound == 0 else None)
        if how.method == "ma":
            self._average(own, arrived)
        gradients = self._gradients(p, own)
        if how.method == "ma":
            self._update(own, gradients)
        else:
            own.own_sum = _sum([own.own_sum, gradients] if own.own_sum else [gradients])
            self._update(own, _sum([gradients, *(each for updates in arrived.values() for each in updates)]))
        own.step += 1
        own.since += 1
        changed = [every for step, every in self._changes.items() if step < own.step]
        every = changed[-1] if changed else how.interval_steps
        if own.since == every or own.step in (*self._settlements, *self._changes):
            sent = [each.detach().clone() for each in own.layers.parameters()] if how.method == "ma" else own.own_sum
            assert sent is not None
            for (sender, _), messages in self.in_the_air.items():
                if sender == p:
                    messages.append((own.sent, sent))
            own.own_sum = None
            own.sent, own.since = own.sent + 1, 0

    def finish(self) -> None:
        """All steps are done: everything arrives, and is applied."""
        self.settle()

    def settle(self) -> None:
        """Everything arrives, and is applied, between two steps of all pipelines."""
        for pair, messages in self.in_the_air.items():
            while messages:
                self.deliver(*pair)
        for own in self.pipelines:
            arrived = self._take(own, None)
            if self._plan.synchronisation.method == "ma":
                self._average(own, arrived)
            elif arrived:
                self._update(own, _sum([each for updates in arrived.values() for each in updates]))

    def parameters(self, p: int) -> Mapping[str, torch.Tensor]:
        return {name: value.detach() for name, value in self.pipelines[p].layers.named_parameters()}

    def _take(self, own: _Pipeline, end: int | None) -> dict[int, list[Numbers]]:
        taken = {}
        for sender, updates in own.arrived.items():
            applied = [(number, each) for number, each in updates if end is None or number < end]
            own.arrived[sender] = [(number, each) for number, each in updates if end is not None and number >= end]
            if applied:
                taken[sender] = [each for _, each in applied]
        return taken

    def _average(self, own: _Pipeline, arrived: Mapping[int, list[Numbers]]) -> None:
        with torch.no_grad():
            for index, parameter in enumerate(own.layers.parameters()):
                moves = [updates[-1][index] - parameter for updates in arrived.values()]
                parameter += sum(moves, torch.zeros(())) / len(self.pipelines)

    def _gradients(self, p: int, own: _Pipeline) -> Numbers:
        whole = self._plan.global_batch
        samples = self._plan.pipelines[p].samples
        inputs, targets = self._batch(p, own.step)
        mean = self.model.loss(own.layers(inputs), targets)
        self.losses += [0.0] * (own.step + 1 - len(self.losses))
        self.losses[own.step] += float(mean.detach()) * samples / whole
        weight = 1.0 if self._plan.synchronisation.method == "ma" else samples / whole
        return list(torch.autograd.grad(mean * weight, list(own.layers.parameters())))

    def _batch(self, p: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        samples = self._plan.pipelines[p].samples
        if self._scenario.data:
            device = self._plan.pipelines[p].stages[0].replicas[0].device
            region = self._scenario.cluster.by_name[device].region
            return regional_batch(self.model, step, self._scenario, region, samples)
        first = sum(pipeline.samples for pipeline in self._plan.pipelines[:p])
        whole = self._plan.global_batch
        inputs, targets = samples_at(self.model, step * whole, whole, self._training)
        return inputs[first : first + samples], targets[first : first + samples]

    def _update(self, own: _Pipeline, gradients: Numbers) -> None:
        factor, clip_norm = 1.0, self._training.clip_norm
        if clip_norm is not None:
            factor = min(1.0, clip_norm / (float(nn.utils.get_total_norm(gradients)) + 1e-6))
        with torch.no_grad():
            for parameter, gradient in zip(own.layers.parameters(), gradients, strict=True):
                parameter -= self._training.optimizer.learning_rate * factor * gradient


def in_step(
    scenario: Scenario,
    plan: Plan,
    steps: int,
    settlements: Collection[int] = (),
    changes: Mapping[int, int] | None = None,
) -> Recursion:
    """What a staleness bound of 0 makes of any timing: all pipelines take a step, then every update arrives."""
    recursion = Recursion(scenario, plan, settlements, changes)
    for step in range(steps):
        if step in settlements:
            recursion.settle()
        for p in range(len(plan.pipelines)):
            recursion.step(p)
        for pair, messages in recursion.in_the_air.items():
            while messages:
                recursion.deliver(*pair)
    recursion.finish()
    return recursion


def _sum(rows: list[Numbers]) -> Numbers:
    return [sum(parts[1:], parts[0].clone()) for parts in zip(*rows, strict=True)]
