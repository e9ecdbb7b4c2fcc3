"""Adaptation policies by name: one file each."""

from collections.abc import Callable, Mapping

from planner.policies.asteroid_replay import AsteroidReplay
from planner.policies.auto import AutoPolicy
from planner.policies.cannikin import CannikinPolicy
from planner.policies.cloudless import CloudlessPolicy
from planner.policies.deepcee import DeepceePolicy
from planner.policies.depth import DepthPolicy
from planner.policies.heavy_rescheduling import HeavyRescheduling
from planner.policy import Policy
from planner.scenario import Scenario
from traces.naming import find_by_name

POLICIES: Mapping[str, Callable[[Scenario], Policy] | None] = {
    "none": None,
    "asteroid-replay": AsteroidReplay,
    "auto": AutoPolicy,
    "cannikin": CannikinPolicy,
    "cloudless": CloudlessPolicy,
    "deepcee": DeepceePolicy,
    "depth": DepthPolicy,
    "heavy-rescheduling": HeavyRescheduling,
}


def make_policy(name: str, scenario: Scenario) -> Policy | None:
    """Return a fresh policy for one run; None for ``none``.

    Raises:
        InputError: No policy has this name.
    """
    make = find_by_name(name, POLICIES, "policy")
    return make(scenario) if make is not None else None
