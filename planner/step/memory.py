"""What each action of a step takes of its device's memory and gives back, and what comes to the most at once.

A forward takes its activations when it starts; a backward gives them back when it ends. Where backward is split, the
part that weight gradients need stays until these are done. A backward has its workspace while it runs. Where a stage
recomputes, a forward takes only the stage's input, and its backward takes the rest when it starts. Only a device's own
actions change what it holds, so that its peak follows from their order alone, whatever the links do.
"""

from dataclasses import dataclass

import numpy as np

from planner.cost.memory import recomputed_bytes, saved_activation_bytes, state_bytes
from planner.plan.plan import Plan
from planner.scenario.effects import MemoryEffects
from planner.scenario.scenario import Scenario
from planner.schedules.kernel.problem import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from planner.step.compile import CompiledStep, compile_step
from planner.step.graph import Floats


@dataclass(frozen=True, eq=False, slots=True)
class MemoryUse:
    """Bytes, on the device of each action.

    Attributes:
        step: Whose actions these are: the plan's without overlap, since it changes nothing when gradients are summed.
        taken: When it starts, [actions].
        returned: When it ends, [actions].
        workspace: In between, [actions].
        standing: Of each actor all the time: states, and what the framework takes, [actors].
    """

    step: CompiledStep
    taken: Floats
    returned: Floats
    workspace: Floats
    standing: Floats


def memory_use(plan: Plan, scenario: Scenario, effects: MemoryEffects | None = None) -> MemoryUse:
    """Return what a step of a plan does to memory.

    Assumed: all activations of a microbatch stay until its weight gradient. Of a transformer layer most do (Qi et
    al., Zero Bubble Pipeline Parallelism, 2024, count 32 of 34 + 5 as/h units).

    Args:
        plan: A plan that can be compiled.
        scenario: What it is for.
        effects: What the framework takes; as the scenario says if None.
    """
    taken_by = effects or scenario.effects.memory
    step = compile_step(plan.without_overlap, scenario)
    each, standing = _stage_bytes(step, plan, scenario)
    kind, stage = step.actions.kind, _stage_numbers(step, plan)
    samples = (step.actions.end_sample - step.actions.first_sample).astype(np.float64)
    own = kind <= BACKWARD_WEIGHT
    kept, recomputed, largest = np.where(own, samples, 0.0) * each[:, step.actions.actor, np.where(own, stage, 0)]
    whole, backward = kind == BACKWARD, (kind == BACKWARD) | (kind == BACKWARD_INPUT)
    returned = np.where(whole, kept, np.where(kind == BACKWARD_WEIGHT, kept + recomputed, 0.0))
    workspace = taken_by.workspace_share * largest + np.where(whole, recomputed, 0.0)
    return MemoryUse(
        step=step,
        taken=np.where(kind == FORWARD, kept, np.where(kind == BACKWARD_INPUT, recomputed, 0.0)),
        returned=returned,
        workspace=np.where(backward, workspace, 0.0),
        standing=standing + taken_by.framework_bytes,
    )


def peak_bytes(plan: Plan, scenario: Scenario, effects: MemoryEffects | None = None) -> dict[str, int]:
    """Return the most bytes that each actor's devices hold at once in a step of the plan."""
    use = memory_use(plan, scenario, effects)
    step, peaks = use.step, {}
    for actor, name in enumerate(step.actors):
        own = slice(int(step.graph.first_action[actor]), int(step.graph.first_action[actor + 1]))
        before = np.cumsum(use.taken[own] - use.returned[own]) - use.taken[own] + use.returned[own]
        during = before + use.taken[own] + use.workspace[own]
        peaks[name] = round(float(use.standing[actor] + during.max(initial=0.0)))
    return peaks


def _stage_numbers(step: CompiledStep, plan: Plan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    first_stage = np.cumsum([0, *(len(pipeline.stages) for pipeline in plan.pipelines)])
    return np.asarray(step.actions.stage + first_stage[step.actions.pipeline], np.int64)


def _stage_bytes(step: CompiledStep, plan: Plan, scenario: Scenario) -> tuple[Floats, Floats]:
    """Bytes of a sample, [kept, recomputed, largest layer; actors; stages counted through], and of states, [actors]."""
    number = {name: actor for actor, name in enumerate(step.actors)}
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    each = np.zeros((3, len(number), len(stages)))
    standing = np.zeros(len(number))
    for index, stage in enumerate(stages):
        first, end = stage.first_layer, stage.end_layer
        for replica in stage.replicas:
            actor, degree = number[replica.device], replica.tensor_parallel
            largest = scenario.model.at_degree(degree).largest_activation_bytes(first, end)
            of_sample = (
                saved_activation_bytes(scenario, stage, degree),
                recomputed_bytes(scenario, stage, degree),
                largest,
            )
            each[:, actor, index] = of_sample
            standing[actor] += state_bytes(scenario, first, end, degree)
    return each, standing
