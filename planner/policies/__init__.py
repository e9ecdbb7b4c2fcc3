"""Adaptation policies by name: one file each."""

from collections.abc import Callable, Mapping

from planner.policies.depth import DepthPolicy
from planner.policy import Policy
from planner.scenario import Scenario
from traces.naming import find_by_name

POLICIES: Mapping[str, Callable[[Scenario], Policy] | None] = {"none": None, "depth": DepthPolicy}


def make_policy(name: str, scenario: Scenario) -> Policy | None:
    """Return a fresh policy for one run; None for ``none``.

    Raises:
        InputError: No policy has this name.
    """
    make = find_by_name(name, POLICIES, "policy")
    return make(scenario) if make is not None else None
