"""What the runs, devices and actions of a picture are called; loads no matplotlib."""

from collections.abc import Mapping, Sequence

from planner.plan.plan import Plan
from planner.runs.record import RunRecord


def run_names(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """Return a name for each run: its backend, with the strategy or a number where that is not unique."""
    choices = (
        tuple(record.backend for record in records),
        tuple(f"{record.backend} {record.plan.strategy}" for record in records),
    )
    numbered = tuple(f"{record.backend} {number}" for number, record in enumerate(records, start=1))
    return next((names for names in choices if len(set(names)) == len(records)), numbered)


def plan_at(record: RunRecord, step: int) -> Plan:
    """Return the plan that a step ran."""
    decided = (decision.plan for decision in reversed(record.decisions) if decision.first_step <= step)
    return next(decided, record.plan)


def device_names(record: RunRecord, first_step: int, end_step: int) -> Mapping[str, str]:
    """Return the devices that work in some steps, in plan order, each with a name for people.

    Args:
        record: The run.
        first_step: Index of the first step.
        end_step: Index after the last one.

    Returns:
        Device to ``device (stage k, region)``, by the first plan that has it; the pipeline is named where
        there are several.
    """
    names: dict[str, str] = {}
    for plan in dict.fromkeys(plan_at(record, step) for step in range(first_step, end_step)):
        for pipeline_index, pipeline in enumerate(plan.pipelines):
            prefix = f"pipeline {pipeline_index}, " if len(plan.pipelines) > 1 else ""
            for stage_index, stage in enumerate(pipeline.stages):
                for replica in stage.replicas:
                    region = record.scenario.cluster.by_name[replica.device].region
                    names.setdefault(replica.device, f"{replica.device} ({prefix}stage {stage_index}, {region})")
    return names
