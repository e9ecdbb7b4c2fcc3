"""What a plan is to be best in, as a person says it on the command line; only strategy ``auto`` can be told."""

from dataclasses import dataclass
from math import inf

from experiments.runs.scenario import Ordering, choose_plan, with_ordering
from planner.check.check import check_plan
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.auto.auto import plan_for
from planner.systems.auto.objective import OBJECTIVES, Objective
from planner.systems.auto.robust import check_quantile
from planner.systems.auto.robust_plan import robust_plan
from traces.common.errors import InputError
from traces.common.names import unknown_name

_STRATEGY = "auto"


@dataclass(frozen=True, slots=True)
class PlanObjective:
    """What was asked for; None where nothing was.

    Attributes:
        name: One of `planner.systems.auto.objective.OBJECTIVES`.
        budget_per_hour: US dollars that the plan may cost.
        rate_samples_per_s: Samples a second that it must reach.
        robust: Share of the windows of the links' traces in which the plan may be slower than it is judged by.
    """

    name: str | None = None
    budget_per_hour: float | None = None
    rate_samples_per_s: float | None = None
    robust: float | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The options that were given."""
        named = {
            "--objective": self.name,
            "--budget": self.budget_per_hour,
            "--rate": self.rate_samples_per_s,
            "--robust": self.robust,
        }
        return tuple(option for option, value in named.items() if value is not None)


def choose_best_plan(scenario: Scenario, strategy: str | None, ordering: Ordering, objective: PlanObjective) -> Plan:
    """Return the checked plan that a strategy makes, the best one for the objective if there is one.

    Raises:
        InputError: An objective is given for a strategy that cannot be told, or it is none, or no plan meets it.
    """
    if not objective.options:
        return choose_plan(scenario, None, strategy, ordering)
    if strategy != _STRATEGY:
        given = f"strategy '{strategy}'" if strategy is not None else "no strategy"
        raise InputError(
            f"{objective.options[0]} is given with {given}",
            valid=f"only '--strategy {_STRATEGY}' plans for an objective: name it, or leave the option out",
        )
    made = _best_plan(scenario, objective)
    check_plan(made, scenario)
    return with_ordering(made, scenario, ordering)


def _best_plan(scenario: Scenario, asked: PlanObjective) -> Plan:
    objective = _objective(asked)
    if asked.robust is None:
        return plan_for(scenario, objective)
    try:
        check_quantile(asked.robust)
    except InputError as error:
        raise error.within("--robust") from None
    return robust_plan(scenario, objective, asked.robust)


def _objective(asked: PlanObjective) -> Objective:
    if asked.name is not None and asked.name not in OBJECTIVES:
        raise unknown_name("objective", asked.name, OBJECTIVES, where="--objective")
    for option, value in (("--budget", asked.budget_per_hour), ("--rate", asked.rate_samples_per_s)):
        if value is not None and not 0 < value < inf:
            raise InputError(f"{value:g}", where=option, valid="a finite number above zero")
    return Objective(asked.name or "throughput", asked.budget_per_hour, asked.rate_samples_per_s)
