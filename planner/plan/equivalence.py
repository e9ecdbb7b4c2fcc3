"""Equivalent pipelines of a plan, which take the same time and are changed together."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace

from planner.plan.plan import Pipeline, Plan
from planner.scenario.scenario import Scenario


def equivalent_pipelines(plan: Plan, scenario: Scenario) -> list[list[int]]:
    """Return the indices of pipelines in groups of equal layers, shares, microbatches, device kinds and regions."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, pipeline in enumerate(plan.pipelines):
        groups[_key(pipeline, scenario)].append(index)
    return list(groups.values())


def representatives(plan: Plan, scenario: Scenario) -> Plan:
    """Return the plan with one pipeline of each group and without gradient sums, which would be over fewer."""
    first = tuple(plan.pipelines[group[0]] for group in equivalent_pipelines(plan, scenario))
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


def replace_pipelines(plan: Plan, group: Sequence[int], changed: Sequence[Pipeline]) -> Plan:
    """Return the plan with ``changed`` in place of the pipelines of a group."""
    pipelines = list(plan.pipelines)
    for index, pipeline in zip(group, changed, strict=True):
        pipelines[index] = pipeline
    return replace(plan, pipelines=tuple(pipelines))
