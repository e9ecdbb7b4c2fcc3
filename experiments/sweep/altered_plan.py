"""A plan with other values at some places, whoever made it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.sweep.paths import Keys, with_value
from planner.check.check import check_plan
from planner.files.documents import Document, Location
from planner.files.parsing import parse
from planner.files.plan import plan_json
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from traces.common.errors import InputError


def altered_plan(plan: Plan, changes: Mapping[Keys, Any], scenario: Scenario) -> Plan:
    """Return the checked plan that says something else at some places.

    Args:
        plan: As it was read or made.
        changes: Values by path into the plan's file.
        scenario: That the plan is for.

    Raises:
        InputError: A path leads nowhere, or the plan does not fit the scenario any more.
    """
    tree = json.loads(plan_json(plan))
    try:
        # What replaces a whole comes before what replaces a part of it.
        for keys in sorted(changes, key=len):
            tree = with_value(tree, keys, changes[keys])
        altered = parse(Plan, _PlanInMemory(tree), tree)
        check_plan(altered, scenario)
    except InputError as error:
        raise error.within("plan") from None
    return altered


class _PlanInMemory(Document):
    """A plan that is in no file."""

    def __init__(self, value: Any) -> None:
        self.path = Path()
        self.value = value

    def where(self, location: Location) -> str:
        return ".".join(map(str, location))
