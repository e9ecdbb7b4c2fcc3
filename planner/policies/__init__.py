"""Adaptation policies by name: one file each."""

from collections.abc import Callable, Mapping

from planner.naming import unknown_name
from planner.policies.depth import DepthPolicy
from planner.policy import Policy
from planner.scenario import Scenario

POLICIES: Mapping[str, Callable[[Scenario], Policy] | None] = {"none": None, "depth": DepthPolicy}


def make_policy(name: str, scenario: Scenario) -> Policy | None:
    """Return a fresh policy for one run; None for ``none``.

    Raises:
        InputError: No policy has this name.
    """
    if name not in POLICIES:
        raise unknown_name("policy", name, POLICIES)
    make = POLICIES[name]
    return make(scenario) if make is not None else None
