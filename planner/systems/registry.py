"""Tables of the built-in strategies and policies by name, and functions that make plans and policies from names.

A strategy makes a plan for a scenario; a policy may replace the plan between two steps. A user can also give the path
of a Python file instead of a name.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from planner.adapt.observation import Observation
from planner.adapt.policy import Policy
from planner.check import check_plan
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.policy import AsteroidReplay, HeavyRescheduling
from planner.systems.asteroid.strategy import asteroid, asteroid_duplex
from planner.systems.auto.policy import AutoPolicy
from planner.systems.auto.strategy import auto
from planner.systems.baselines.hybrid import dapple, hetpipe, pipedream
from planner.systems.baselines.uniform import ddp, gpipe, megatron, zb_equal
from planner.systems.cannikin.policy import CannikinPolicy
from planner.systems.cannikin.strategy import adaptdl, cannikin, lb_bsp
from planner.systems.cloudless.policy import CloudlessPolicy
from planner.systems.cloudless.strategy import cloudless, greedy
from planner.systems.deepcee.policy import DeepceePolicy, DepthPolicy
from planner.systems.deepcee.strategy import deepcee
from planner.systems.user_code import load_function, user_code
from traces.common.errors import InputError, find_by_name

Strategy = Callable[[Scenario], Plan]

STRATEGIES: Mapping[str, Strategy] = {
    "adaptdl": adaptdl,
    "asteroid": asteroid,
    "asteroid-duplex": asteroid_duplex,
    "auto": auto,
    "cannikin": cannikin,
    "cloudless": cloudless,
    "dapple": dapple,
    "ddp": ddp,
    "deepcee": deepcee,
    "gpipe": gpipe,
    "greedy": greedy,
    "hetpipe": hetpipe,
    "lb-bsp": lb_bsp,
    "megatron": megatron,
    "pipedream": pipedream,
    "zb-h1-equal": zb_equal,
}

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


def make_plan(strategy: str, scenario: Scenario) -> Plan:
    """Return the plan that a strategy makes for a scenario, checked by `check_plan`.

    Args:
        strategy: Name of a strategy, or path of a Python file that defines ``plan(scenario)``.
        scenario: Model, cluster and training to plan for.

    Raises:
        InputError: The name or file is unknown, the user's code fails, or `check_plan` refuses the plan.
    """
    if strategy.endswith(".py"):
        plan = _plan_from_file(Path(strategy), scenario)
    else:
        plan = find_by_name(strategy, STRATEGIES, "strategy")(scenario)
    check_plan(plan, scenario)
    return plan


def make_policy(name: str, scenario: Scenario) -> Policy | None:
    """Return a new policy object for one run, or None for the policy ``none``, which never changes the plan.

    Args:
        name: Name of a policy, or path of a Python file that defines a function or class ``policy(scenario)``.
        scenario: Model, cluster and training that the policy decides for.

    Raises:
        InputError: The name or file is unknown, or the user's code fails.
    """
    if name.endswith(".py"):
        return _policy_from_file(Path(name), scenario)
    make = find_by_name(name, POLICIES, "policy")
    return make(scenario) if make is not None else None


def _plan_from_file(path: Path, scenario: Scenario) -> Plan:
    make = load_function(path, "plan", "strategy", "plan(scenario) that returns a planner.plan.plan.Plan")
    with user_code(path, "'plan' fails", f"correct plan(scenario) in {path.name}"):
        made = make(scenario)
    if not isinstance(made, Plan):
        raise InputError(
            f"plan(scenario) returns a {type(made).__name__}", where=str(path), valid="return a planner.plan.plan.Plan"
        )
    return made


def _policy_from_file(path: Path, scenario: Scenario) -> Policy:
    make = load_function(path, "policy", "policy", "policy(scenario) that returns an object with 'decide'")
    with user_code(path, "'policy' fails", f"correct policy(scenario) in {path.name}"):
        made: Policy = make(scenario)
    if not callable(getattr(made, "decide", None)):
        raise InputError(
            f"policy(scenario) returns a {type(made).__name__} without 'decide'",
            where=str(path),
            valid="return an object with decide(observation, plan), as planner.adapt.policy.Policy",
        )
    return _UserPolicy(path, made)


class _UserPolicy:
    """A policy from a user's file, whose exceptions become an `InputError` that names the file."""

    def __init__(self, path: Path, policy: Policy) -> None:
        self._path = path
        self._policy = policy

    @property
    def thinking_s(self) -> float:
        """Seconds that the policy says the last call takes; 0 if it says nothing."""
        return float(getattr(self._policy, "thinking_s", 0.0))

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        with user_code(self._path, f"'decide' fails at step {observation.step}", "correct this method"):
            return self._policy.decide(observation, plan)
