"""Functions that make plans from templates: they choose devices of the device classes, and depths."""

from collections.abc import Sequence
from dataclasses import replace

from planner.cost.in_flight import fitting_depths, plain_depths
from planner.plan.microbatches import even_cut
from planner.plan.plan import Pipeline, Plan, Replica, Stage
from planner.scenario.scenario import Scenario
from planner.step.orders import hiding_depths
from planner.systems.auto.candidates.device_classes import DeviceClass
from planner.systems.auto.candidates.templates import PipelineTemplate

# Device names of a pipeline, by stage, replica and tensor-parallel rank: ``places[stage][replica]`` is the tuple of
# names of the devices that share the replica's layers.
Places = tuple[tuple[tuple[str, ...], ...], ...]

# Schedule and order of candidate plans. A dynamic order needs no search and is nearly as fast as one that is searched.
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
    """Return a copy of the pipeline on other devices; shares and depths stay the same."""
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
    """Return the device names of a pipeline."""
    return tuple(tuple(replica.devices for replica in stage.replicas) for stage in pipeline.stages)


def _places(template: PipelineTemplate) -> list[Places]:
    """Return the devices of each pipeline; replicas of a stage are on one host if possible."""
    places: list[list[tuple[tuple[str, ...], ...]]] = [[] for _ in range(template.pipelines)]
    used: dict[DeviceClass, int] = {}
    for stage in template.stages:
        device_class, width = stage.option.device_class, stage.option.width
        first, groups = used.get(device_class, 0), device_class.groups(stage.option.degree)
        used[device_class] = first + template.pipelines * width
        for number, own in enumerate(places):
            at = first + number * width
            own.append(tuple(groups[at : at + width]))
    return [tuple(own) for own in places]


def _pipeline(template: PipelineTemplate, samples: int, places: Places) -> Pipeline:
    stages = tuple(
        Stage(
            stage.first_layer,
            stage.end_layer,
            tuple(Replica(group[0], 1.0, group[1:]) for group in groups),
            in_flight=1,
            recompute=stage.option.recompute,
        )
        for stage, groups in zip(template.stages, places, strict=True)
    )
    return Pipeline(stages, even_cut(samples, -(-samples // template.microbatch)))


def with_hiding_depths(pipeline: Pipeline, scenario: Scenario) -> Pipeline | None:
    """Return the pipeline with depths (microbatches in flight) that hide transfers, as far as memory allows.

    The result is None if a stage does not fit into memory even with one microbatch in flight.
    """
    fitted = fitting_depths(plain_depths(len(pipeline.stages)), pipeline.stages, scenario, pipeline.microbatches)
    if fitted is None:
        return None
    return pipeline.with_depths(hiding_depths(pipeline, scenario) if len(pipeline.stages) > 1 else fitted)
