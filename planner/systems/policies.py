"""Adaptation policies by name: one file each."""

from collections.abc import Callable, Mapping
from pathlib import Path

from planner.adapt.observation import Observation
from planner.adapt.policy import Policy
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.policy import AsteroidReplay, HeavyRescheduling
from planner.systems.auto.policy import AutoPolicy
from planner.systems.cannikin.policy import CannikinPolicy
from planner.systems.cloudless.policy import CloudlessPolicy
from planner.systems.deepcee.policy import DeepceePolicy, DepthPolicy
from planner.systems.user_code import load_function, user_code
from traces.common.errors import InputError
from traces.common.names import find_by_name

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

    Args:
        name: Of the policy, or a Python file with a function or class ``policy`` of a scenario.
        scenario: What is trained, and where.

    Raises:
        InputError: There is no such policy.
    """
    if name.endswith(".py"):
        return _from_file(Path(name), scenario)
    make = find_by_name(name, POLICIES, "policy")
    return make(scenario) if make is not None else None


def _from_file(path: Path, scenario: Scenario) -> Policy:
    make = load_function(path, "policy", "policy", "policy(scenario) that returns an object with 'decide'")
    with user_code(path, "'policy' fails", "correct the policy"):
        made: Policy = make(scenario)
    if not callable(getattr(made, "decide", None)):
        raise InputError(
            f"'policy' returns a {type(made).__name__} without 'decide'",
            where=str(path),
            valid="see planner.adapt.policy.Policy",
        )
    return _FromFile(path, made)


class _FromFile:
    """A user's policy: what it raises is wrong input, wherever it is asked."""

    def __init__(self, path: Path, policy: Policy) -> None:
        self._path = path
        self._policy = policy

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        with user_code(self._path, f"'decide' fails at step {observation.step}", "correct the policy"):
            return self._policy.decide(observation, plan)
