"""The verb ``ropebridge plan``: make a plan, write it, and describe it."""

import json
from dataclasses import astuple, dataclass, replace
from math import inf
from pathlib import Path

from experiments.runs.console import check_targets
from experiments.runs.scenario import Ordering, choose_plan, choose_scenario, with_ordering
from planner.check import check_plan
from planner.explain.explanation import explain
from planner.files.plan import plan_json, write_plan
from planner.plan.actions import to_torch_csv
from planner.plan.plan import Plan
from planner.runs.published_laws import published_law
from planner.scenario.scenario import Scenario
from planner.scenario.training import FLOAT32_BYTES
from planner.step.orders import plan_orders
from planner.systems.auto.objective import OBJECTIVES, Objective, contended_step_time_s
from planner.systems.auto.robust import check_quantile
from planner.systems.auto.strategy import robust_plan, start_plan
from planner.systems.regional.loss_plan import LOSS_OBJECTIVES, LossGoal
from planner.systems.regional.report import LossReport
from planner.systems.regional.search import plan_to_loss
from traces.common.atomic import write_text_atomically, written_together
from traces.common.errors import InputError, unknown_name
from traces.common.units import number_text

_STRATEGY = "auto"

# Share by which the step of an explanation must differ from the predicted one to be told.
_NOTED = 0.03


@dataclass(frozen=True, slots=True)
class PlanObjective:
    """The options that set the objective of strategy `auto`; None for an option that is not given.

    Attributes:
        name: One of `planner.systems.auto.objective.OBJECTIVES`, or of `LOSS_OBJECTIVES`.
        budget_per_hour: Largest cost of the plan, US dollars per hour.
        rate_samples_per_s: Least throughput of the plan, samples/s.
        robust: Share of the traces' time windows that may be slow: plans are compared by the throughput that each
            reaches in all other windows.
        loss: The loss to reach; only with an objective of `planner.systems.regional.loss_plan.LOSS_OBJECTIVES`.
        assumed_tokens: Tokens of a sample, by which published laws of language models take the place of a convergence
            file.
    """

    name: str | None = None
    budget_per_hour: float | None = None
    rate_samples_per_s: float | None = None
    robust: float | None = None
    loss: float | None = None
    assumed_tokens: int | None = None

    @property
    def limits(self) -> dict[str, float | None]:
        """The limits by their names in `planner.systems.auto.objective.Limits`."""
        return {"budget_per_hour": self.budget_per_hour, "samples_per_s": self.rate_samples_per_s}


@dataclass(frozen=True)
class ChosenPlan:
    """A plan, and for an objective that is a loss, what it takes to the loss."""

    plan: Plan
    to_loss: LossReport | None = None


def choose_best_plan(
    scenario: Scenario, strategy: str | None, ordering: Ordering, objective: PlanObjective
) -> ChosenPlan:
    """Return a strategy's plan, checked; if an objective is given, the plan that `auto` finds for this objective.

    Raises:
        InputError: An objective is given with a strategy other than `auto`, it is unknown, or no plan meets it.
    """
    options = ("--objective", "--budget", "--rate", "--robust", "--loss", "--assume-convergence")
    first = next((option for option, value in zip(options, astuple(objective), strict=True) if value is not None), None)
    if first is None:
        return ChosenPlan(choose_plan(scenario, None, strategy, ordering))
    if strategy not in (None, _STRATEGY):
        raise InputError(
            f"{first} is given with strategy '{strategy}'",
            valid=f"only '--strategy {_STRATEGY}' plans for an objective: name it, or leave the option out",
        )
    made = _best_plan(scenario, objective)
    check_plan(made.plan, scenario)
    return replace(made, plan=with_ordering(made.plan, scenario, ordering))


def _best_plan(scenario: Scenario, asked: PlanObjective) -> ChosenPlan:
    names = (*OBJECTIVES, *LOSS_OBJECTIVES)
    if asked.name is not None and asked.name not in names:
        raise unknown_name("objective", asked.name, names, where="--objective")
    for option, value in (
        ("--budget", asked.budget_per_hour),
        ("--rate", asked.rate_samples_per_s),
        ("--loss", asked.loss),
    ):
        if value is not None and not 0 < value < inf:
            raise InputError(f"{value:g} is not allowed", where=option, valid="give a finite number above zero")
    if asked.name in LOSS_OBJECTIVES:
        return _plan_to_loss(scenario, asked)
    for option, given in (("--loss", asked.loss), ("--assume-convergence", asked.assumed_tokens)):
        if given is not None:
            valid = f"add '--objective {LOSS_OBJECTIVES[0]}' or '--objective {LOSS_OBJECTIVES[1]}', or leave it out"
            raise InputError("it has no meaning for this objective", where=option, valid=valid)
    objective = Objective(asked.name or "throughput", **asked.limits)
    if asked.robust is None:
        return ChosenPlan(start_plan(scenario, objective))
    try:
        check_quantile(asked.robust)
    except InputError as error:
        raise error.within("--robust") from None
    return ChosenPlan(robust_plan(scenario, objective, asked.robust))


def _plan_to_loss(scenario: Scenario, asked: PlanObjective) -> ChosenPlan:
    assert asked.name is not None, "it is one of the objectives"
    if asked.loss is None:
        raise InputError(f"the objective '{asked.name}' needs a loss", where="--objective", valid="add --loss LOSS")
    if asked.robust is not None:
        valid = "leave it out: time and cost to a loss are those at declared rates"
        raise InputError(f"it does not fit the objective '{asked.name}'", where="--robust", valid=valid)
    law = scenario.training.convergence
    if asked.assumed_tokens is not None:
        if law is not None:
            valid = "leave it out, or remove 'convergence' from the scenario's training"
            raise InputError("the scenario names a convergence file", where="--assume-convergence", valid=valid)
        parameters = scenario.model.parameter_bytes(0, len(scenario.model.layers)) // FLOAT32_BYTES
        law = published_law(max(1, parameters), asked.assumed_tokens)
    if law is None:
        raise InputError(
            f"nobody has measured how the loss of '{scenario.name}' falls",
            where="--objective",
            valid="run 'ropebridge profile convergence SCENARIO -o FILE' and name FILE as 'training: {convergence: "
            "FILE}', or plan by published laws of language models with '--assume-convergence TOKENS_OF_A_SAMPLE'",
        )
    assumed = asked.assumed_tokens is not None
    goal = LossGoal(asked.name, asked.loss, law, assumed, **asked.limits)
    found = plan_to_loss(scenario, goal)
    how = "assumed" if assumed else "measured"
    named = replace(found.best.plan, strategy=f"{_STRATEGY} to loss {asked.loss:g} by {how} convergence")
    return ChosenPlan(named, LossReport(goal, found))


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
    """Make a plan, write it to the given files, and return what to print: the plan, or a description of it.

    Args:
        scenario_name: A file, or the name of a ready scenario.
        strategy: Name of a strategy; None for the default one.
        ordering: An order of actions that replaces the strategy's order.
        output: File for the plan; None writes none.
        torch_csv: File for the first pipeline's schedule as torch.distributed.pipelining reads it; None writes none.
        as_json: Whether to return the plan as JSON; with ``explains``, an object with plan and explanation.
        objective: The objective of strategy `auto`.
        explains: Whether to add an explanation: the resource that limits the plan, and changes that would help.

    Raises:
        InputError: An option or the scenario is not valid; no file is written.
    """
    check_targets((output, torch_csv))
    scenario = choose_scenario(scenario_name)
    chosen = choose_best_plan(scenario, strategy, ordering, objective)
    made, to_loss = chosen.plan, chosen.to_loss
    for_torch = ""
    if torch_csv is not None:
        orders = plan_orders(made, scenario)[0]
        for_torch = to_torch_csv([orders.actions(worker) for worker in range(orders.worker_count)])
    explanation = explain(made, scenario, objective.robust) if explains else None
    with written_together():
        if output is not None:
            write_plan(made, output)
        if torch_csv is not None:
            write_text_atomically(torch_csv, for_torch)
    if as_json:
        if explanation is None:
            return plan_json(made)
        found = {} if to_loss is None else {"to_loss": to_loss.document()}
        document = {"plan": json.loads(plan_json(made)), "explanation": explanation.document(), **found}
        return json.dumps(document, indent=2)
    step_s = contended_step_time_s(made, scenario)
    description = describe_plan(made, scenario, step_s)
    if to_loss is not None:
        description += "\n" + "\n".join(to_loss.lines(explains))
    if explanation is None:
        return description
    if abs(explanation.step_s - step_s) > _NOTED * explanation.step_s:
        description += f"\nexplained: a step of {number_text(explanation.step_s)} s, with a path for each two devices"
    return f"{description}\n{explanation}"


def describe_plan(plan: Plan, scenario: Scenario, step_s: float) -> str:
    """Return a plan's pipelines, stages and step time, which is ``step_s`` seconds, as a few lines of text."""
    lines = [f"{plan.strategy} plan for {plan.scenario}: {plan.schedule}, {plan.global_batch} samples a step"]
    for number, pipeline in enumerate(plan.pipelines):
        sizes = sorted(set(pipeline.microbatches), reverse=True)
        each = " or ".join(str(size) for size in sizes)
        lines.append(f"pipeline {number}: {len(pipeline.microbatches)} microbatches of {each} samples")
        for index, stage in enumerate(pipeline.stages):
            devices = ", ".join(
                f"{' + '.join(replica.devices)} ({scenario.cluster.by_name[replica.device].kind})"
                for replica in stage.replicas
            )
            layers = f"layers {stage.first_layer} to {stage.end_layer - 1}"
            lines.append(f"  stage {index}: {layers}, {stage.in_flight} in flight, on {devices}")
    if plan.compression != "none":
        lines.append(f"messages between regions: {plan.compression}")
    network = scenario.effects.network
    # What the evaluator leaves out, where it may take as long again (docs/systems/auto.md).
    shrinks = network.cold_start and network.idle_s < inf and len(plan.devices) > 1
    without = ", not counting TCP's windows, which shrink in pauses: simulate shows them" if shrinks else ""
    lines.append(f"one step on steady links: {number_text(step_s)} s{without}")
    return "\n".join(lines)
