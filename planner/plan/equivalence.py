"""Pipelines of a plan that are alike: what is true of one is true of all, and a change is made to all of them."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace

from planner.plan.plan import Pipeline, Plan
from planner.scenario.scenario import Scenario


def alike_pipelines(plan: Plan, scenario: Scenario) -> list[list[int]]:
    """Return the indices of pipelines in groups: same layers, shares and microbatches, on devices that are alike."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, pipeline in enumerate(plan.pipelines):
        groups[_key(pipeline, scenario)].append(index)
    return list(groups.values())


def representatives(plan: Plan, scenario: Scenario) -> Plan:
    """Return the plan with the first of each group of alike pipelines only, which do not sum gradients."""
    first = tuple(plan.pipelines[group[0]] for group in alike_pipelines(plan, scenario))
    return replace(plan, pipelines=first, synchronisation=replace(plan.synchronisation, method="asgd", bucket_bytes=0))


def _key(pipeline: Pipeline, scenario: Scenario) -> Hashable:
    devices = scenario.cluster.by_name
    stages = tuple(
        (
            stage.first_layer,
            stage.end_layer,
            stage.recompute,
            tuple(
                (devices[replica.device].kind, devices[replica.device].region, replica.tensor_parallel, replica.share)
                for replica in stage.replicas
            ),
        )
        for stage in pipeline.stages
    )
    return stages, pipeline.microbatches


def change_alike(plan: Plan, group: Sequence[int], changed: Sequence[Pipeline]) -> Plan:
    """Return the plan with other pipelines in the places of a group."""
    pipelines = list(plan.pipelines)
    for index, pipeline in zip(group, changed, strict=True):
        pipelines[index] = pipeline
    return replace(plan, pipelines=tuple(pipelines))
