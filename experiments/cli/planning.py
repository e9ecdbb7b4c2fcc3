"""``ropebridge plan``: make a plan and say what it promises."""

import json
from pathlib import Path

from experiments.cli.plan_objective import PlanObjective, choose_best_plan
from experiments.runs.scenario import Ordering, choose_scenario
from experiments.runs.targets import check_targets
from planner.explain.explanation import Explanation, explain
from planner.files.plan import plan_json, write_plan
from planner.plan.actions import to_torch_csv
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.step.evaluate import step_time_s
from planner.step.plan_orders import plan_orders
from traces.common.atomic import write_text_atomically


def plan(
    scenario_name: str,
    strategy: str | None,
    ordering: Ordering,
    output: Path | None,
    torch_csv: Path | None,
    as_json: bool,
    objective: PlanObjective,
    explains: bool,
) -> str:
    """Make a plan, write it if asked to, and return what to print: the plan, or a description of it.

    Args:
        scenario_name: A file or a ready scenario.
        strategy: Name of a strategy, or None.
        ordering: Another schedule than the strategy's, or None of it.
        output: File for the plan, or None.
        torch_csv: File for the schedule of its first pipeline as torch.distributed.pipelining reads it, or None.
        as_json: Whether to return the plan itself; with its explanation, if that is asked for, as an object of both.
        objective: What the plan is to be best in.
        explains: Whether to say what binds the plan.

    Raises:
        InputError: Something is wrong; then neither file is written.
    """
    check_targets((output, torch_csv))
    scenario = choose_scenario(scenario_name)
    made = choose_best_plan(scenario, strategy, ordering, objective)
    for_torch = _torch_csv(made, scenario) if torch_csv is not None else ""
    explanation = explain(made, scenario, objective.robust) if explains else None
    if output is not None:
        write_plan(made, output)
    if torch_csv is not None:
        write_text_atomically(torch_csv, for_torch)
    if as_json:
        return plan_json(made) if explanation is None else _explained_json(made, explanation)
    lines = [describe_plan(made, scenario), *([explanation.text()] if explanation is not None else [])]
    return "\n".join(lines)


def _explained_json(plan: Plan, explanation: Explanation) -> str:
    return json.dumps({"plan": json.loads(plan_json(plan)), "explanation": explanation.document()}, indent=2)


def _torch_csv(plan: Plan, scenario: Scenario) -> str:
    orders = plan_orders(plan, scenario)[0]
    return to_torch_csv([orders.actions(worker) for worker in range(orders.worker_count)])


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
