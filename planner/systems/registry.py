"""Tables of the built-in strategies and policies by name, and functions that make plans and policies from names.

A strategy makes a plan for a scenario; a policy may replace the plan between two steps. A user can also give the path
of a Python file instead of a name.
"""

from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from pathlib import Path
from sys import float_info
from typing import Any, cast

from planner.adapt.observation import Observation
from planner.adapt.policy import Coverage, Policy, coverage_of, measures_unused_links
from planner.check import check_plan
from planner.check.types import check_types
from planner.plan.plan import Plan
from planner.scenario.scenario import Scenario
from planner.systems.asteroid.policy import AsteroidReplay, HeavyRescheduling
from planner.systems.asteroid.strategy import asteroid, asteroid_duplex
from planner.systems.auto.strategy import auto
from planner.systems.baselines.hybrid import dapple, hetpipe, pipedream
from planner.systems.baselines.uniform import ddp, gpipe, megatron, zb_equal
from planner.systems.cannikin.policy import CannikinPolicy
from planner.systems.cannikin.strategy import adaptdl, cannikin, lb_bsp
from planner.systems.cloudless.policy import CloudlessPolicy
from planner.systems.cloudless.strategy import cloudless, greedy
from planner.systems.deepcee.policy import DeepceePolicy, DepthPolicy
from planner.systems.deepcee.strategy import deepcee
from planner.systems.regional.exchange_policy import AnyMethodPolicy
from planner.systems.regional.streaming_policy import StreamingPolicy
from planner.systems.user_code import call_in_time, limit_of, load_function
from traces.common.errors import InputError, find_by_name, shown

Strategy = Callable[[Scenario], Plan]

# What 'decide' returns, and the policy's 'thinking_s'.
_Answer = tuple[object, object]

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
    "auto": AnyMethodPolicy,
    "cannikin": CannikinPolicy,
    "cloudless": CloudlessPolicy,
    "deepcee": DeepceePolicy,
    "depth": DepthPolicy,
    "heavy-rescheduling": HeavyRescheduling,
    "streaming": StreamingPolicy,
}


def make_plan(strategy: str, scenario: Scenario) -> Plan:
    """Return the plan that a strategy makes for a scenario, checked by `check_plan`.

    Args:
        strategy: Name of a strategy, or path of a Python file that defines ``plan(scenario)``.
        scenario: Model, cluster and training to plan for.

    Raises:
        InputError: The name or file is unknown; the user's code fails or takes too long; or the plan is not valid.
    """
    if strategy.endswith(".py"):
        return _plan_from_file(Path(strategy), scenario)
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
    limit_s = limit_of(path, "strategy")

    returned = call_in_time(partial(make, scenario), limit_s, path, "'plan'")
    try:
        plan = check_types(returned)
        check_plan(plan, scenario)
    except InputError as error:
        raise error.within(f"{path}: 'plan' returns a plan that is not valid") from None
    return plan


def _policy_from_file(path: Path, scenario: Scenario) -> Policy:
    make = load_function(path, "policy", "policy", "policy(scenario) that returns an object with 'decide'")
    limit_s = limit_of(path, "policy")

    def made() -> tuple[Any, bool]:
        policy = make(scenario)
        return policy, callable(getattr(policy, "decide", None))

    policy, has_decide = call_in_time(made, limit_s, path, "'policy'")
    if not has_decide:
        raise _without_decide(f"policy(scenario) returns {shown(policy)}", str(path))
    return _CheckedPolicy(policy, str(path), path.name, lambda call, what: call_in_time(call, limit_s, path, what))


def checked_policy(policy: Policy) -> Policy:
    """Return a policy that raises an `InputError` for whatever an object of somebody else's class wrongly returns.

    Raises:
        InputError: The object has no ``decide``.
    """
    if isinstance(policy, _CheckedPolicy):
        return policy
    name = getattr(policy, "name", type(policy).__name__)
    where = f"policy {name}"
    if isinstance(policy, type) or not callable(getattr(policy, "decide", None)):
        raise _without_decide(f"{shown(policy)} is given, a class or an object", where)
    return _CheckedPolicy(policy, where, name, lambda call, _: call())


def _without_decide(problem: str, where: str) -> InputError:
    valid = "return an object with decide(observation, plan), as planner.adapt.policy.Policy"
    return InputError(f"{problem} without 'decide'", where=where, valid=valid)


class _CheckedPolicy:
    """A policy of somebody else: what it wrongly returns is an `InputError` that names its file or class.

    Args:
        policy: An object with ``decide``.
        where: What errors name.
        call: Calls a function that calls the policy, with the name of the call for messages; returns its result.
    """

    def __init__(
        self, policy: Policy, where: str, name: str, call: Callable[[Callable[[], _Answer], str], _Answer]
    ) -> None:
        self._policy, self._where, self._call = policy, where, call
        self.name = name
        self.thinking_s = 0.0
        self.measures_unused_links = measures_unused_links(policy)

    @property
    def coverage(self) -> Coverage | None:
        """How often the policy's forecasts were right, if it counts that."""
        return coverage_of(self._policy)

    def decide(self, observation: Observation, plan: Plan) -> Plan | None:
        """Return the policy's answer, and set ``thinking_s``, the seconds that the policy says the call takes."""

        def answer() -> _Answer:
            returned = self._policy.decide(observation, plan)
            return returned, getattr(self._policy, "thinking_s", 0.0)

        what = f"'decide' at step {observation.step}"
        returned, thinking_s = self._call(answer, what)
        if not isinstance(thinking_s, Real) or not 0 <= cast(float, thinking_s) <= float_info.max:
            raise InputError(
                f"thinking_s = {shown(thinking_s)} is not allowed",
                where=self._where,
                valid="give a finite number of seconds, 0 or more",
            )
        self.thinking_s = float(thinking_s)
        if returned is None or returned is plan:
            return None if returned is None else plan
        try:
            return check_types(returned)
        except InputError as error:
            raise error.within(f"{self._where}: {what} returns neither None nor a valid plan") from None
