"""Scenarios and plans as a person names them on the command line."""

import os.path
from pathlib import Path

from planner.check import check_plan
from planner.files.plan_file import read_plan
from planner.files.scenario_file import read_scenario
from planner.files.scenario_json import read_resolved_scenario
from planner.plan import Plan
from planner.scenario import Scenario
from planner.strategies import make_plan
from traces.errors import InputError
from traces.naming import find_by_name

READY_FOLDER = Path(__file__).parent / "scenarios"

DEFAULT_STRATEGY = "megatron"


def ready_scenarios() -> dict[str, Path]:
    """Return the scenarios that come with ropebridge, by name."""
    named = (path for path in sorted(READY_FOLDER.glob("*.yaml")) if "\ncluster:" in path.read_text())
    return {path.stem: path for path in named}


def choose_scenario(name: str) -> Scenario:
    """Return the scenario in the file ``name``, that of the run in the folder ``name``, or the ready one of that name.

    Raises:
        InputError: There is neither, or the file is wrong.
    """
    path = Path(name)
    if path.suffix == ".json":
        return read_resolved_scenario(path)
    # os.path answers no, where pathlib raises, for a name that no file can have.
    if os.path.isfile(path / "scenario.json"):
        return read_resolved_scenario(path / "scenario.json")
    if os.path.isfile(path) or path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return read_scenario(path)
    return read_scenario(find_by_name(name, ready_scenarios(), "scenario", where="SCENARIO"))


def choose_plan(scenario: Scenario, plan: Path | None, strategy: str | None) -> Plan:
    """Return the checked plan from a file, or the one that a strategy makes.

    Raises:
        InputError: Both are given, or the plan does not fit the scenario.
    """
    if plan is None:
        return make_plan(strategy or DEFAULT_STRATEGY, scenario)
    if strategy is not None:
        raise InputError("both --plan and --strategy are given", valid="a plan has been made already: give one of them")
    chosen = read_plan(plan)
    try:
        check_plan(chosen, scenario)
    except InputError as error:
        origin = "" if chosen.scenario == scenario.name else f" (made for scenario '{chosen.scenario}')"
        raise error.within(f"{plan}{origin}") from None
    return chosen
