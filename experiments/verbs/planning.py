"""``ropebridge plan``: make a plan and say what it promises."""

from pathlib import Path

from experiments.scenario_choice import DEFAULT_STRATEGY, choose_scenario
from planner.actions import to_torch_csv
from planner.evaluate import step_time_s
from planner.files.plan_file import plan_json, write_plan
from planner.plan import Plan
from planner.scenario import Scenario
from planner.schedules import SCHEDULES
from planner.strategies import make_plan
from traces.atomic import write_text_atomically


def plan(scenario_name: str, strategy: str | None, output: Path | None, torch_csv: Path | None, as_json: bool) -> str:
    """Make a plan, write it if asked to, and return what to print: the plan, or a description of it.

    Args:
        scenario_name: A file or a ready scenario.
        strategy: Name of a strategy, or None.
        output: File for the plan, or None.
        torch_csv: File for the schedule of its first pipeline as torch.distributed.pipelining reads it, or None.
        as_json: Whether to return the plan itself.
    """
    scenario = choose_scenario(scenario_name)
    made = make_plan(strategy or DEFAULT_STRATEGY, scenario)
    if output is not None:
        write_plan(made, output)
    if torch_csv is not None:
        pipeline = made.pipelines[0]
        order = SCHEDULES[made.schedule]
        ranks = [order(pipeline, stage) for stage in range(len(pipeline.stages))]
        write_text_atomically(torch_csv, to_torch_csv(ranks))
    return plan_json(made) if as_json else describe_plan(made, scenario)


def describe_plan(plan: Plan, scenario: Scenario) -> str:
    """Return a plan as a few lines for people."""
    lines = [f"{plan.strategy} plan for {plan.scenario}: {plan.schedule}, {plan.global_batch} samples a step"]
    for number, pipeline in enumerate(plan.pipelines):
        sizes = sorted(set(pipeline.microbatches), reverse=True)
        each = " or ".join(str(size) for size in sizes)
        lines.append(f"pipeline {number}: {len(pipeline.microbatches)} microbatches of {each} samples")
        for index, stage in enumerate(pipeline.stages):
            devices = ", ".join(
                f"{replica.device} ({scenario.cluster.by_name[replica.device].kind})" for replica in stage.replicas
            )
            layers = f"layers {stage.first_layer} to {stage.end_layer - 1}"
            lines.append(f"  stage {index}: {layers}, {stage.in_flight} in flight, on {devices}")
    lines.append(f"one step on steady links: {step_time_s(plan, scenario):.3f} s")
    return "\n".join(lines)
