"""Training of DiLoCo and Streaming DiLoCo in one process, with torch's optimizers: what both steps must equal."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from executor.training.models.loading import load_model
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from tests.helpers.processes.training import optimizer_of, samples_at


@dataclass
class Separate:
    """What training leaves: the mean loss of each step, and the parameters of each pipeline and in common."""

    losses: list[float]
    parameters: list[Mapping[str, torch.Tensor]]
    common: Mapping[str, torch.Tensor]


def fragment_of(layer: int, layers: int, outer: OuterStep) -> int:
    """The fragment that has a layer, counted out."""
    if outer.pattern == "strided":
        return layer % outer.fragments
    return max(each for each in range(outer.fragments) if each * layers // outer.fragments <= layer)


@dataclass
class _Worker:
    """The model of a worker, and its optimizer."""

    model: nn.Sequential
    optimizer: torch.optim.Optimizer


def train_separately(
    scenario: Scenario,
    plan: Plan,
    steps: int,
    changes: Mapping[int, Plan] = MappingProxyType({}),
    anew: Mapping[int, str] = MappingProxyType({}),
) -> Separate:
    """Train every pipeline by itself in one process, and take the outer steps with `torch.optim.SGD`.

    With the steps of ``changes`` other plans begin, after all outer steps that are under way. A worker that was not
    there before has the common parameters then, and the optimizer's state of the first one that was and stays; so has
    before a step of ``anew`` the one that begins on this device.
    """
    assert scenario.code is not None
    training, outer = scenario.training, plan.synchronisation.outer
    model = load_model(scenario.code, training.seed)
    common = nn.Sequential(*model.layers)
    workers: dict[str, _Worker] = {}

    def begin(name: str) -> None:
        own = copy.deepcopy(common)
        optimizer = optimizer_of(training.optimizer, own)
        if donors := [worker for other, worker in workers.items() if other != name]:
            optimizer.load_state_dict(copy.deepcopy(donors[0].optimizer.state_dict()))
        workers[name] = _Worker(own, optimizer)

    for name in first_devices(plan):
        begin(name)
    nesterov = outer.momentum > 0
    moves = torch.optim.SGD(common.parameters(), outer.learning_rate, outer.momentum, nesterov=nesterov)
    pending: list[tuple[int, list[int], list[torch.Tensor]]] = []
    losses = []

    def take_outer_steps(before: int) -> None:
        for due, layers, means in sorted([each for each in pending if each[0] <= before], key=lambda each: each[:2]):
            own = [each for index in layers for each in common[index].parameters()]
            for parameter, mean in zip(own, means, strict=True):
                parameter.grad = mean
            moves.step()
            moves.zero_grad()
            with torch.no_grad():
                for worker in workers.values():
                    mine = [each for index in layers for each in worker.model[index].parameters()]
                    for parameter, new in zip(mine, own, strict=True):
                        parameter.copy_(outer.mixing * parameter + (1 - outer.mixing) * new)
            pending.remove((due, layers, means))

    for step in range(steps):
        if step in changes:
            take_outer_steps(steps + outer.overlap_steps)
            plan = changes[step]
            outer = plan.synchronisation.outer
            moves.param_groups[0] |= {"lr": outer.learning_rate, "momentum": outer.momentum}
            workers = {name: worker for name, worker in workers.items() if name in first_devices(plan)}
            for name in first_devices(plan):
                if name not in workers:
                    begin(name)
            workers = {name: workers[name] for name in first_devices(plan)}
        if step in anew:
            take_outer_steps(steps + outer.overlap_steps)
            begin(anew[step])
            workers = {name: workers[name] for name in first_devices(plan)}
        take_outer_steps(step)
        inputs, targets = samples_at(model, step * plan.global_batch, plan.global_batch, training)
        first, total = 0, 0.0
        weights = [pipeline.samples / plan.global_batch for pipeline in plan.pipelines]
        for worker, pipeline, weight in zip(workers.values(), plan.pipelines, weights, strict=True):
            end = first + pipeline.samples
            worker.optimizer.zero_grad()
            loss = model.loss(worker.model(inputs[first:end]), targets[first:end])
            loss.backward()
            if training.clip_norm is not None:
                nn.utils.clip_grad_norm_(worker.model.parameters(), training.clip_norm)
            worker.optimizer.step()
            total += weight * float(loss.detach())
            first = end
        losses.append(total)
        every = plan.synchronisation.interval_steps
        for fragment, layers in enumerate(fragments_of(common, outer)):
            offset = (fragment + 1) * every // outer.fragments
            if (step + 1) % every == offset % every:
                means = _means(common, [worker.model for worker in workers.values()], weights, layers)
                pending.append((step + 1 + outer.overlap_steps, layers, means))
    take_outer_steps(steps + outer.overlap_steps)
    parameters = [dict(worker.model.named_parameters()) for worker in workers.values()]
    return Separate(losses, [_detached(each) for each in parameters], _detached(dict(common.named_parameters())))


def first_devices(plan: Plan) -> list[str]:
    """The name of the device on which each worker begins."""
    return [pipeline.stages[0].replicas[0].device for pipeline in plan.pipelines]


def fragments_of(model: nn.Sequential, outer: OuterStep) -> list[list[int]]:
    """The layers of each fragment."""
    layers = range(len(model))
    return [[each for each in layers if fragment_of(each, len(model), outer) == p] for p in range(outer.fragments)]


def _means(
    common: nn.Sequential, workers: list[nn.Sequential], weights: list[float], layers: list[int]
) -> list[torch.Tensor]:
    means = []
    with torch.no_grad():
        for index in layers:
            columns = zip(common[index].parameters(), *(worker[index].parameters() for worker in workers), strict=True)
            for parameter, *own in columns:
                parts = [weight * (parameter - each) for weight, each in zip(weights, own, strict=True)]
                means.append(torch.stack(parts).sum(dim=0))
    return means


def _detached(parameters: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return {name: each.detach() for name, each in parameters.items()}
