"""All ranks of a plan in this process, one action at a time: real compute without a network."""

import random
from collections.abc import Callable, Mapping

import torch

from executor.core.clock import RunClock
from executor.core.step_program import DeviceProgram, StepProgram, Transfer, compile_plan
from executor.training.models.loading import load_with_sizes
from executor.training.real_compute import RealCompute
from planner.check import check_plan
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from tests.helpers.processes.training import Trained

Programs = Mapping[str, DeviceProgram]


def train_on_all_ranks(scenario: Scenario, plan: Plan | Callable[[int], Plan], steps: int, *, seed: int = 0) -> Trained:
    """Train by a plan, or by one for each step; of the ranks that can go on, ``seed`` draws which does."""
    assert scenario.code is not None
    plan_of = plan if callable(plan) else lambda step: plan
    chance = random.Random(seed)
    first, training = plan_of(0), scenario.training
    ranks = {
        device: RealCompute(
            load_with_sizes(scenario.code, training.seed, training.precision),
            first,
            program,
            training,
            RunClock(0.0),
        )
        for device, program in compile_plan(first, scenario).items()
    }
    losses = []
    for step in range(steps):
        current = plan_of(step)
        check_plan(current, scenario)
        programs = compile_plan(current, scenario)
        for device, rank in ranks.items():
            rank.start_step(StepProgram(step, current, programs[device], step * current.global_batch))
        _carry_out(ranks, programs, chance)
        _synchronise(ranks, programs)
        norm = _squared_norm(ranks, current) if scenario.training.clip_norm is not None else None
        parts = [rank.finish_step(step, norm) for rank in ranks.values()]
        losses.append(sum(part for part in parts if part is not None))
    return Trained(losses, _parameters(ranks))


def _carry_out(ranks: Mapping[str, RealCompute], programs: Programs, chance: random.Random) -> None:
    """Run every rank's actions in order; payloads go over in copies, as they would over a wire."""
    left = {device: list(program.work) for device, program in programs.items()}
    arrived: dict[Transfer, torch.Tensor] = {}
    while any(left.values()):
        ready = [device for device, work in left.items() if work and all(each in arrived for each in work[0].receives)]
        assert ready, "every rank waits for another one"
        device = chance.choice(ready)
        work = left[device].pop(0)
        done = ranks[device].run(
            work, [arrived.pop(each) for each in work.receives], ready_s=0.0, complete=lambda _: None
        )
        for send, payload in zip(work.sends, done.outputs, strict=True):
            assert payload.dtype == torch.uint8
            assert payload.shape == (send.size_bytes,)
            arrived[send] = payload.clone()
    assert not arrived


def _synchronise(ranks: Mapping[str, RealCompute], programs: Programs) -> None:
    for sync in dict.fromkeys(sync for program in programs.values() for sync in program.synchronisations):
        parts = [ranks[device].begin_sum(sync) for device in sync.devices]
        total = torch.stack([each.values for each in parts]).sum(0)
        for each in parts:
            each.values = total
            each.end()


def _squared_norm(ranks: Mapping[str, RealCompute], plan: Plan) -> float:
    """Of every layer once: the first pipeline has them all, and so have the first replicas of its stages."""
    devices = {stage.replicas[0].device for stage in plan.pipelines[0].stages}
    return sum(ranks[device].squared_norm() for device in devices)


def _parameters(ranks: Mapping[str, RealCompute]) -> dict[str, torch.Tensor]:
    parameters: dict[str, torch.Tensor] = {}
    for rank in ranks.values():
        for name, value in rank.named_parameters().items():
            assert torch.equal(parameters.setdefault(name, value), value), f"replicas of {name} differ"
    return parameters
