"""The memory that each action of a step allocates and frees on its device, and the peak.

A forward allocates its activations when it starts; the backward frees them when it ends (if split, when the weight
gradient ends). A backward holds a workspace while it runs. If a stage recomputes, its forward allocates only the
stage's input, and the backward allocates the other activations. Only a device's own actions change its memory, so that
the peak depends on the order of actions alone, not on the links.
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
    """Changes of memory by the actions of a step, bytes.

    Attributes:
        step: Compiled step of the plan without overlap; overlap does not change memory.
        taken: Bytes that each action allocates when it starts, [actions].
        returned: Bytes that each action frees when it ends, [actions].
        workspace: Bytes that each action holds only while it runs, [actions].
        resident: Constant bytes of each actor: parameters, gradients, optimizer state and framework, [actors].
    """

    step: CompiledStep
    taken: Floats
    returned: Floats
    workspace: Floats
    resident: Floats


def memory_use(plan: Plan, scenario: Scenario, effects: MemoryEffects | None = None) -> MemoryUse:
    """Return the bytes that each action of a step allocates and frees; ``effects`` replace the scenario's effects.

    Assumption: all activations of a microbatch stay until its weight gradient. In a transformer layer most do (Qi et
    al., Zero Bubble Pipeline Parallelism, 2024: 32 of 34 + 5 as/h units).
    """
    effects = effects or scenario.effects.memory
    step = compile_step(plan.without_overlap, scenario)
    each, resident = _stage_bytes(step, plan, scenario)
    kind, stage = step.actions.kind, _stage_numbers(step, plan)
    samples = (step.actions.stop_sample - step.actions.start_sample).astype(np.float64)
    own = kind <= BACKWARD_WEIGHT
    saved, recomputed = np.where(own, samples, 0.0) * each[:, step.actions.actor, np.where(own, stage, 0)]
    whole, backward = kind == BACKWARD, (kind == BACKWARD) | (kind == BACKWARD_INPUT)
    returned = np.where(whole, saved, np.where(kind == BACKWARD_WEIGHT, saved + recomputed, 0.0))
    workspace = _workspaces(step, plan, scenario, effects) + np.where(whole, recomputed, 0.0)
    return MemoryUse(
        step=step,
        taken=np.where(kind == FORWARD, saved, np.where(kind == BACKWARD_INPUT, recomputed, 0.0)),
        returned=returned,
        workspace=np.where(backward, workspace, 0.0),
        resident=resident + effects.framework_bytes,
    )


def peak_bytes(plan: Plan, scenario: Scenario, effects: MemoryEffects | None = None) -> dict[str, int]:
    """Return the peak bytes per device of each actor in a step, by the actor's device name."""
    use = memory_use(plan, scenario, effects)
    step, peaks = use.step, {}
    for actor, name in enumerate(step.actors):
        own = slice(int(step.graph.first_action[actor]), int(step.graph.first_action[actor + 1]))
        before = np.cumsum(use.taken[own] - use.returned[own]) - use.taken[own] + use.returned[own]
        during = before + use.taken[own] + use.workspace[own]
        peaks[name] = round(float(use.resident[actor] + during.max(initial=0.0)))
    return peaks


def _stage_numbers(step: CompiledStep, plan: Plan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    first_stage = np.cumsum([0, *(len(pipeline.stages) for pipeline in plan.pipelines)])
    return np.asarray(step.actions.stage + first_stage[step.actions.pipeline], np.int64)


def _workspaces(step: CompiledStep, plan: Plan, scenario: Scenario, effects: MemoryEffects) -> Floats:
    """Return the bytes that each backward holds beside all activations of its stage; 0 for other actions, [actions]."""
    kind, found = step.actions.kind, np.zeros(len(step.actions.kind))
    degrees = {replica.device: replica.tensor_parallel for replica in plan.replicas}
    rows = np.flatnonzero((kind == BACKWARD) | (kind == BACKWARD_INPUT))
    samples = (step.actions.stop_sample - step.actions.start_sample)[rows]
    columns = (step.actions.actor[rows], _stage_numbers(step, plan)[rows], samples)
    cases, which = np.unique(np.stack(columns), axis=1, return_inverse=True)
    sizes = np.array(
        [
            scenario.model.at_degree(degrees[step.actors[actor]]).workspace_bytes(
                plan.stages[stage].first_layer, plan.stages[stage].end_layer, count, effects.workspace_share
            )
            for actor, stage, count in cases.T.tolist()
        ]
    )
    found[rows] = sizes[which.reshape(-1)]
    return found


def _stage_bytes(step: CompiledStep, plan: Plan, scenario: Scenario) -> tuple[Floats, Floats]:
    """Return bytes per sample, [2, actors, stages of all pipelines], and bytes of states, [actors].

    Rows of the first: saved, recomputed.
    """
    number = {name: actor for actor, name in enumerate(step.actors)}
    each = np.zeros((2, len(number), len(plan.stages)))
    resident = np.zeros(len(number))
    for index, stage in enumerate(plan.stages):
        first, end = stage.first_layer, stage.end_layer
        for replica in stage.replicas:
            actor, degree = number[replica.device], replica.tensor_parallel
            each[0, actor, index] = saved_activation_bytes(scenario, stage, degree)
            each[1, actor, index] = recomputed_bytes(scenario, stage, degree)
            resident[actor] += state_bytes(scenario, first, end, degree)
    return each, resident
