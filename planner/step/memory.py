"""The memory that each action of a step allocates and frees on its device, and the peak.

A forward allocates its activations when it starts; the backward frees them when it ends. If it is split, what the
weight gradient needs stays until that ends (`LayerProfile.memory`; all activations if this was not measured). Backwards
hold a workspace while they run. If a stage recomputes, its forward allocates only the stage's input, and the backward
allocates the other activations. Only a device's own actions change its memory, so that the peak depends on the order of
actions alone, not on the links.
"""

from dataclasses import dataclass

import numpy as np

from planner.cost.memory import deferred_bytes, recomputed_bytes, saved_activation_bytes, state_bytes
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
    """Return the bytes that each action of a step allocates and frees; ``effects`` replace the scenario's effects."""
    effects = effects or scenario.effects.memory
    step = compile_step(plan.without_overlap, scenario)
    each, resident = _stage_bytes(step, plan, scenario)
    kind, stage = step.actions.kind, _stage_numbers(step, plan)
    samples = (step.actions.stop_sample - step.actions.start_sample).astype(np.float64)
    own = kind <= BACKWARD_WEIGHT
    of_action = each[:, step.actions.actor, np.where(own, stage, 0)]
    saved, recomputed, deferred = np.where(own, samples, 0.0) * of_action
    # What stays after an input gradient may be more than all activations, with which it begins.
    whole, workspace = saved + recomputed, _workspaces(step, plan, scenario, effects)
    grown = np.maximum(whole, deferred)
    kinds = [kind == FORWARD, kind == BACKWARD, kind == BACKWARD_INPUT, kind == BACKWARD_WEIGHT]
    nothing = np.zeros_like(saved)
    return MemoryUse(
        step=step,
        taken=np.select(kinds, [saved, nothing, grown - saved, nothing]),
        returned=np.select(kinds, [nothing, saved, grown - deferred, deferred]),
        workspace=np.select(
            kinds, [nothing, recomputed + workspace, np.maximum(0.0, whole + workspace - grown), workspace]
        ),
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
    """Return the bytes that each part of a backward holds only while it runs; 0 for other actions, [actions].

    A backward and an input gradient hold them beside all activations of the stage, a weight gradient beside what was
    kept for it.
    """
    kind, found = step.actions.kind, np.zeros(len(step.actions.kind))
    degrees = {replica.device: replica.tensor_parallel for replica in plan.replicas}
    rows = np.flatnonzero((kind > FORWARD) & (kind <= BACKWARD_WEIGHT))
    samples = (step.actions.stop_sample - step.actions.start_sample)[rows]
    columns = (step.actions.actor[rows], _stage_numbers(step, plan)[rows], samples)
    cases, which = np.unique(np.stack(columns), axis=1, return_inverse=True)
    sizes = np.zeros((BACKWARD_WEIGHT + 1, cases.shape[1]))
    share = effects.workspace_share
    for case, (actor, stage, count) in enumerate(cases.T.tolist()):
        model = scenario.model.at_degree(degrees[step.actors[actor]])
        layers = plan.stages[stage].first_layer, plan.stages[stage].end_layer
        sizes[BACKWARD, case] = model.workspace_bytes(*layers, count, share)
        sizes[[BACKWARD_INPUT, BACKWARD_WEIGHT], case] = model.split_workspace_bytes(*layers, count, share)
    found[rows] = sizes[kind[rows], which.reshape(-1)]
    return found


def _stage_bytes(step: CompiledStep, plan: Plan, scenario: Scenario) -> tuple[Floats, Floats]:
    """Return bytes per sample, [3, actors, stages of all pipelines], and bytes of states, [actors].

    Rows of the first: saved, recomputed, kept for the weight gradient.
    """
    number = {name: actor for actor, name in enumerate(step.actors)}
    each = np.zeros((3, len(number), len(plan.stages)))
    resident = np.zeros(len(number))
    for index, stage in enumerate(plan.stages):
        first, end = stage.first_layer, stage.end_layer
        for replica in stage.replicas:
            actor, degree = number[replica.device], replica.tensor_parallel
            each[0, actor, index] = saved_activation_bytes(scenario, stage, degree)
            each[1, actor, index] = recomputed_bytes(scenario, stage, degree)
            each[2, actor, index] = deferred_bytes(scenario, stage, degree)
            resident[actor] += state_bytes(scenario, first, end, degree)
    return each, resident
