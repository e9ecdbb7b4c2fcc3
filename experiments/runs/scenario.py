"""Returns the scenarios and plans that the command line names."""

import os.path
from dataclasses import dataclass
from pathlib import Path

from experiments.scenarios import ready_scenarios
from planner.check import check_places, check_plan
from planner.files.documents import read_text
from planner.files.plan import read_plan
from planner.files.resolved_scenario import read_resolved_scenario
from planner.files.scenario import read_scenario
from planner.plan.actions import from_torch_csv
from planner.plan.plan import EXPLICIT, Plan
from planner.scenario.scenario import Scenario
from planner.schedules import SCHEDULES
from planner.step.orders import with_orders, with_schedule
from planner.systems.registry import make_plan
from traces.common.errors import InputError, find_by_name

DEFAULT_STRATEGY = "auto"


def choose_scenario(name: str) -> Scenario:
    """Return a scenario by the path of its file, by the folder of a run of it, or by the name of a ready scenario.

    Raises:
        InputError: There is no such scenario, or its file is not valid.
    """
    path = Path(name)
    if path.suffix == ".json":
        return read_resolved_scenario(path)
    # For a name that no file can have, os.path returns False where pathlib raises.
    if os.path.isfile(path / "scenario.json"):
        return read_resolved_scenario(path / "scenario.json")
    if os.path.isfile(path) or path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return read_scenario(path)
    return read_scenario(find_by_name(name, ready_scenarios(), "scenario", where="SCENARIO"))


@dataclass(frozen=True, slots=True)
class Ordering:
    """An order of a plan's actions that replaces the strategy's order.

    Attributes:
        schedule: Name of a schedule; None keeps the plan's.
        dynamic: Whether devices choose among ready actions at run time.
        orders: CSV file in the format of torch.distributed.pipelining with each worker's actions; None for no file.
    """

    schedule: str | None = None
    dynamic: bool = False
    orders: Path | None = None


def choose_plan(scenario: Scenario, plan: Path | None, strategy: str | None, ordering: Ordering = Ordering()) -> Plan:
    """Return the checked plan from a file, or the one that a strategy makes, with the given order.

    Raises:
        InputError: Both a plan and a strategy are given, or the plan does not fit the scenario.
    """
    if plan is None:
        return with_ordering(make_plan(strategy or DEFAULT_STRATEGY, scenario), scenario, ordering)
    if strategy is not None:
        raise InputError("both --plan and --strategy are given", valid="a plan has been made already: give one of them")
    chosen = read_plan(plan)
    try:
        check_places(chosen, scenario)
        chosen = with_ordering(chosen, scenario, ordering)
        check_plan(chosen, scenario)
    except InputError as error:
        origin = "" if chosen.scenario == scenario.name else f" (made for scenario '{chosen.scenario}')"
        raise error.within(f"{plan}{origin}") from None
    return chosen


def with_ordering(plan: Plan, scenario: Scenario, ordering: Ordering) -> Plan:
    """Return the plan with its actions reordered and checked, or the plan itself if ``ordering`` changes nothing.

    Raises:
        InputError: ``ordering`` contradicts itself, or does not fit the plan.
    """
    if ordering.orders is not None:
        if ordering.schedule is not None or ordering.dynamic:
            raise InputError(
                "--orders is given with --schedule or --dynamic",
                valid="a file of orders is a schedule: give one of them",
            )
        text = read_text(ordering.orders)
        try:
            ordered = with_orders(plan, from_torch_csv(text))
            check_plan(ordered, scenario)
        except InputError as error:
            raise error.within(str(ordering.orders)) from None
        return ordered
    if ordering.schedule is None and not ordering.dynamic:
        return plan
    schedule = ordering.schedule or plan.schedule
    if schedule == EXPLICIT and ordering.schedule is None:
        raise InputError(
            "--dynamic is given for a plan that carries its own orders",
            valid="add --schedule, from which devices take whether the backward is split",
        )
    find_by_name(schedule, SCHEDULES, "schedule", where="--schedule")
    ordered = with_schedule(plan, scenario, schedule, "dynamic" if ordering.dynamic else "scheduled")
    check_plan(ordered, scenario)
    return ordered
