"""The stages of a pipeline cover every layer once, and its microbatches can pass through them."""

from itertools import pairwise

from planner.plan.plan import Pipeline, Plan
from planner.scenario.profile import ModelProfile
from traces.common.errors import InputError

# The schedule in which a stage waits for as many forwards as its depth before its first backward.
_WAITS_FOR_ITS_DEPTH = "1f1b"


def check_layers(pipeline: Pipeline, model: ModelProfile, where: str) -> None:
    """Refuse a pipeline that leaves layers of the model out or has them twice.

    Raises:
        InputError: With the stage that does not continue the one before it.
    """
    expected = 0
    for number, stage in enumerate(pipeline.stages):
        if stage.first_layer != expected or stage.end_layer <= stage.first_layer:
            raise InputError(
                f"the stage holds layers {stage.first_layer} to {stage.end_layer} (exclusive)",
                where=f"{where}.stages[{number}]",
                valid=f"stages cover every layer once and in order: this one starts at layer {expected}",
            )
        expected = stage.end_layer
    count = len(model.layers)
    if expected != count:
        raise InputError(
            f"the stages end at layer {expected}",
            where=f"{where}.stages",
            valid=f"model '{model.name}' has {count} layers: the last stage ends at {count}",
        )


def check_microbatches(pipeline: Pipeline, plan: Plan, where: str) -> None:
    """Refuse microbatches without samples, and depths with which stages wait for each other.

    Raises:
        InputError: With all microbatches, or all depths.
    """
    if not pipeline.microbatches or min(pipeline.microbatches) < 1:
        raise InputError(
            f"microbatches {list(pipeline.microbatches)}",
            where=f"{where}.microbatches",
            valid="give at least one, each with at least one sample",
        )
    depths = [stage.in_flight for stage in pipeline.stages]
    if min(depths) < 1:
        raise InputError(f"in-flight depths {depths}", where=f"{where}.stages", valid="every depth is at least 1")
    reached = [min(depth, len(pipeline.microbatches)) for depth in depths]
    waits = plan.schedule == _WAITS_FOR_ITS_DEPTH and plan.order == "scheduled"
    if waits and any(later > earlier for earlier, later in pairwise(reached)):
        raise InputError(
            f"in-flight depths {depths} would deadlock",
            where=f"{where}.stages",
            valid="a stage waits for as many forwards as its depth before its first backward, so depths may not "
            "grow from stage to stage",
        )
