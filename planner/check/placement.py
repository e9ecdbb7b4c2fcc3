"""Schedules that are made for one way to lay stages on workers."""

from collections.abc import Callable, Mapping

from planner.plan.plan import Pipeline, Plan
from traces.common.errors import InputError

# Schedule to the workers that it needs for so many stages on so many workers, and how it is said.
_Shape = tuple[Callable[[int, int], list[int]], str]

_ONE_EACH: _Shape = (lambda stages, workers: list(range(stages)), "every stage is on devices of its own")
_SHAPES: Mapping[str, _Shape] = {
    "gpipe": _ONE_EACH,
    "1f1b": _ONE_EACH,
    "zb-h1": _ONE_EACH,
    "zb-h2": _ONE_EACH,
    "interleaved-1f1b": (
        lambda stages, workers: [stage % workers for stage in range(-(-stages // workers) * workers)],
        "stages go round the workers, all of them equally often",
    ),
    "zb-v": (
        lambda stages, workers: [*range(workers), *reversed(range(workers))],
        "stages go down the workers and back up, two on each",
    ),
}


def check_placement(pipeline: Pipeline, plan: Plan, where: str) -> None:
    """Refuse stages that do not lie on workers as the plan's schedule needs them.

    Raises:
        InputError: With the worker of each stage as it is and as it must be.
    """
    if plan.order != "scheduled" or plan.schedule not in _SHAPES:
        return
    expect, rule = _SHAPES[plan.schedule]
    workers = list(pipeline.workers)
    expected = expect(len(workers), max(workers) + 1)
    if workers != expected:
        devices = ", ".join(stage.replicas[0].device for stage in pipeline.stages)
        raise InputError(
            f"schedule '{plan.schedule}' cannot have its stages on workers {', '.join(map(str, workers))} "
            f"(devices {devices})",
            where=f"{where}.stages",
            valid=f"{rule}: {', '.join(map(str, expected))}; stages with the same devices are on one worker",
        )
