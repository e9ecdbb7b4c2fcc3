"""What adaptation gains: a policy against no policy from the same plan, simulated and real.

The scenario's link drops to a third and recovers. The gain is the ratio of throughputs; the gain that the
simulator promises must be the one that the real, paced run shows, also where there is none.
"""

import math
from collections.abc import Callable

from executor.backend import TorchBackend, choose_emulator
from experiments.benches.result import Check, at_least, at_most
from experiments.runs.scenario import choose_scenario
from planner.runs.metrics import measure
from planner.runs.record import Backend
from planner.systems.registry import make_plan, make_policy
from sim.simulator import Simulator

SCENARIO = "two-regions"

# Strategy of the first plan, and policy. What `depth` can gain from the first two is known; the others move layers too.
GAINING = (("megatron", "depth"), ("pipedream", "depth"))
MOVING = (("deepcee", "deepcee"), ("megatron", "auto"))

# Long enough for the link's drop and recovery, whichever plan runs.
STEPS = 50

LEAST_GAIN = 1.05
WORST_GAIN_DIFFERENCE = 0.05


def real_checks(tell: Callable[[str], None]) -> list[Check]:
    """Run pipelined plans with and without the policy in both backends; hold the two gains together."""
    scenario = choose_scenario(SCENARIO)
    real = TorchBackend("paced", emulator=choose_emulator("auto", tell), tell=tell)
    backends: dict[str, Backend] = {"simulated": Simulator(), "real": real}
    least, worst, moving = math.inf, 0.0, 0
    for strategy, policy in (*GAINING, *MOVING):
        plan = make_plan(strategy, scenario)
        gains = {}
        for name, backend in backends.items():
            plain = backend.run(scenario, plan, None, STEPS)
            adapted = backend.run(scenario, plan, make_policy(policy, scenario), STEPS)
            gains[name] = measure(adapted).samples_per_s / measure(plain).samples_per_s
            tell(f"{SCENARIO}, {strategy}, policy {policy}, {name}: gain {gains[name]:.3f}")
            moving += any(decision.migration.moves for decision in adapted.decisions)
        if (strategy, policy) in GAINING:
            least = min(least, *gains.values())
        worst = max(worst, abs(gains["simulated"] - gains["real"]))
    return [
        at_least("two regions: least gain of policy depth, simulated or real", least, LEAST_GAIN),
        at_least("two regions: runs in which layers moved", moving, 1),
        at_most("two regions: worst difference of simulated and real gain", worst, WORST_GAIN_DIFFERENCE),
    ]
