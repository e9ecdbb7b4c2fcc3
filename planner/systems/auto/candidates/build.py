"""Make plans from templates: choose the devices of a device class that each pipeline takes."""

from collections.abc import Sequence
from dataclasses import replace

from planner.cost.in_flight import fitting_depths, plain_depths
from planner.plan.microbatches import even_cut
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from planner.step.orders import hiding_depths
from planner.systems.auto.candidates.device_classes import DeviceClass
from planner.systems.auto.candidates.templates import PipelineTemplate

# Device names of a pipeline: a tuple of stages, a stage a tuple of replicas, a replica a tuple of the names of the
# devices that share its layers by tensor parallelism.
Places = tuple[tuple[tuple[str, ...], ...], ...]

# Schedule and order of candidate plans: a dynamic order is nearly as fast as one that a search finds, without search.
QUICK_ORDER = ("compact-zb", "dynamic")


def plan_of(templates: Sequence[PipelineTemplate], scenario: Scenario, strategy: str) -> Plan | None:
    """Return the plan of templates side by side, in `QUICK_ORDER`; None if a microbatch does not fit into memory.

    Args:
        templates: Templates on disjoint device classes; their samples add up to the global batch.
        scenario: Scenario that the plan is for.
        strategy: Name that the plan gives as its strategy.
    """
    pipelines: list[Pipeline] = []
    for template in templates:
        made: dict[int, Pipeline] = {}
        places = _places(template)
        for samples, devices in zip(even_cut(template.samples, template.pipelines), places, strict=True):
            if samples not in made:
                first = with_hiding_depths(_pipeline(template, samples, devices), scenario)
                if first is None:
                    return None
                made[samples] = first
            pipelines.append(on_devices(made[samples], devices))
    schedule, order = QUICK_ORDER
    return Plan(scenario.name, scenario.model.name, strategy, schedule, tuple(pipelines), order)


def on_devices(pipeline: Pipeline, places: Places) -> Pipeline:
    """Return the pipeline with its replicas on other devices; shares and depths are unchanged."""
    stages = tuple(
        replace(
            stage,
            replicas=tuple(
                replace(replica, device=group[0], partners=group[1:])
                for replica, group in zip(stage.replicas, groups, strict=True)
            ),
        )
        for stage, groups in zip(pipeline.stages, places, strict=True)
    )
    return replace(pipeline, stages=stages)


def places_of(pipeline: Pipeline) -> Places:
    """Return the device names of a pipeline by stage, replica and tensor-parallel group."""
    return tuple(tuple(replica.devices for replica in stage.replicas) for stage in pipeline.stages)


def _places(template: PipelineTemplate) -> list[Places]:
    """Return the devices of each pipeline; replicas of a stage are neighbours in the class, if possible in one host."""
    places: list[list[tuple[tuple[str, ...], ...]]] = [[] for _ in range(template.pipelines)]
    used: dict[DeviceClass, int] = {}
    for stage in template.stages:
        first, groups = used.get(stage.device_class, 0), stage.device_class.groups(stage.degree)
        used[stage.device_class] = first + template.pipelines * stage.width
        for number, own in enumerate(places):
            at = first + number * stage.width
            own.append(tuple(groups[at : at + stage.width]))
    return [tuple(own) for own in places]


def _pipeline(template: PipelineTemplate, samples: int, places: Places) -> Pipeline:
    stages = tuple(
        Stage(
            stage.first_layer,
            stage.end_layer,
            tuple(Replica(group[0], 1.0, group[1:]) for group in groups),
            in_flight=1,
            recompute=stage.recompute,
        )
        for stage, groups in zip(template.stages, places, strict=True)
    )
    return Pipeline(stages, even_cut(samples, -(-samples // template.microbatch)))


def with_hiding_depths(pipeline: Pipeline, scenario: Scenario) -> Pipeline | None:
    """Return the pipeline with enough microbatches in flight to hide transfers, or all that fit; None if none fits."""
    fitted = fitting_depths(plain_depths(len(pipeline.stages)), pipeline.stages, scenario, pipeline.microbatches)
    if fitted is None:
        return None
    return pipeline.with_depths(hiding_depths(pipeline, scenario) if len(pipeline.stages) > 1 else fitted)
