"""What the executor cannot carry out yet, though it can be planned and simulated."""

from dataclasses import replace

from planner.actions import Kind
from planner.effects import Effects
from planner.memory_effects import MemoryEffects
from planner.plan import EXPLICIT, Plan
from planner.scenario import Scenario
from traces.errors import InputError

# Schedules whose backward is one action.
_WHOLE_BACKWARD = ("gpipe", "1f1b")
_WHOLE = (Kind.FORWARD, Kind.BACKWARD)

_SIMULATE = "'ropebridge simulate' knows how"


def check_supported(plan: Plan, scenario: Scenario) -> None:
    """Refuse a checked plan, or a scenario, that asks for what only the simulator can do.

    Raises:
        InputError: With the first such thing, and what can be run instead.
    """
    _check_schedule(plan)
    for index, pipeline in enumerate(plan.pipelines):
        where = f"pipelines[{index}].stages"
        if len(set(pipeline.workers)) < len(pipeline.stages):
            raise _unsupported("several stages on one device", where, "give every stage devices of its own")
        for number, stage in enumerate(pipeline.stages):
            for place, replica in enumerate(stage.replicas):
                if replica.tensor_parallel > 1:
                    where_in = f"{where}[{number}].replicas[{place}].partners"
                    raise _unsupported("tensor parallelism", where_in, "leave 'partners' out")
    method = plan.synchronisation.method
    if method != "allreduce":
        raise _unsupported(f"method '{method}'", "synchronisation.method", "run with 'allreduce'")
    if plan.connections > 1:
        raise _unsupported(f"{plan.connections} connections between two devices", "connections", "run with 1")
    # What the launch of kernels takes is in the plan's times; memory is checked, and nothing happens to it.
    happening = replace(scenario.effects, memory=MemoryEffects())
    if replace(happening, compute=replace(happening.compute, launch_overhead_s=0.0)) != Effects():
        raise _unsupported("effects on network and compute", "effects", "remove them: they are simulated, not made")
    if scenario.faults:
        raise _unsupported("faults that a scenario foresees", "faults", "remove them: they are simulated, not made")


def _check_schedule(plan: Plan) -> None:
    if plan.order != "scheduled":
        raise _unsupported(f"order '{plan.order}'", "order", "run with 'scheduled'")
    valid = f"run with one of {', '.join(_WHOLE_BACKWARD)}, or explicit orders of F and B"
    if plan.schedule == EXPLICIT:
        for index, pipeline in enumerate(plan.pipelines):
            split = next((a for order in pipeline.orders for a in order if a.kind not in _WHOLE), None)
            if split is not None:
                raise _unsupported(f"action {split}, a part of a backward", f"pipelines[{index}].orders", valid)
    elif plan.schedule not in _WHOLE_BACKWARD:
        raise _unsupported(f"schedule '{plan.schedule}'", "schedule", valid)


def _unsupported(what: str, where: str, valid: str) -> InputError:
    return InputError(f"{what} cannot be run yet", where=where, valid=f"{valid}; {_SIMULATE}")
