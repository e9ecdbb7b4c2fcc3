"""Training of DiLoCo and Streaming DiLoCo in one process, with torch's optimizers: what both steps must equal."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from executor.training.models.loading import load_model
from planner.plan.outer_step import OuterStep
from planner.plan.plan import Plan, Synchronisation
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


def train_separately(
    scenario: Scenario, plan: Plan, steps: int, changes: Mapping[int, Synchronisation] = MappingProxyType({})
) -> Separate:
    """Train every pipeline by itself in one process, and take the outer steps with `torch.optim.SGD`.

    With the steps of ``changes`` other exchanges begin, after all outer steps that are under way.
    """
    assert scenario.code is not None
    training, how, outer = scenario.training, plan.synchronisation, plan.synchronisation.outer
    model = load_model(scenario.code, training.seed)
    common = nn.Sequential(*model.layers)
    workers = [copy.deepcopy(common) for _ in plan.pipelines]
    inner = [optimizer_of(training.optimizer, worker) for worker in workers]
    fragments = fragments_of(common, outer)
    nesterov = outer.momentum > 0
    moves = torch.optim.SGD(common.parameters(), outer.learning_rate, outer.momentum, nesterov=nesterov)
    weights = [pipeline.samples / plan.global_batch for pipeline in plan.pipelines]
    pending: list[tuple[int, int, list[torch.Tensor]]] = []
    losses = []

    def take_outer_steps(before: int) -> None:
        for due, fragment, means in sorted([each for each in pending if each[0] <= before], key=lambda each: each[:2]):
            own = [each for index in fragments[fragment] for each in common[index].parameters()]
            for parameter, mean in zip(own, means, strict=True):
                parameter.grad = mean
            moves.step()
            moves.zero_grad()
            with torch.no_grad():
                for worker in workers:
                    mine = [each for index in fragments[fragment] for each in worker[index].parameters()]
                    for parameter, new in zip(mine, own, strict=True):
                        parameter.copy_(outer.mixing * parameter + (1 - outer.mixing) * new)
            pending.remove((due, fragment, means))

    for step in range(steps):
        if step in changes:
            take_outer_steps(steps + outer.overlap_steps)
            how, outer = changes[step], changes[step].outer
            fragments = fragments_of(common, outer)
            moves.param_groups[0] |= {"lr": outer.learning_rate, "momentum": outer.momentum}
        take_outer_steps(step)
        inputs, targets = samples_at(model, step * plan.global_batch, plan.global_batch, training)
        first, total = 0, 0.0
        for worker, optimizer, pipeline, weight in zip(workers, inner, plan.pipelines, weights, strict=True):
            end = first + pipeline.samples
            optimizer.zero_grad()
            loss = model.loss(worker(inputs[first:end]), targets[first:end])
            loss.backward()
            if training.clip_norm is not None:
                nn.utils.clip_grad_norm_(worker.parameters(), training.clip_norm)
            optimizer.step()
            total += weight * float(loss.detach())
            first = end
        losses.append(total)
        for fragment, layers in enumerate(fragments):
            offset = (fragment + 1) * how.interval_steps // outer.fragments
            if (step + 1) % how.interval_steps == offset % how.interval_steps:
                pending.append((step + 1 + outer.overlap_steps, fragment, _means(common, workers, weights, layers)))
    take_outer_steps(steps + outer.overlap_steps)
    parameters = [dict(worker.named_parameters()) for worker in workers]
    return Separate(losses, [_detached(each) for each in parameters], _detached(dict(common.named_parameters())))


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
