"""What adaptation gains: policy `depth` against no policy from the same plan, simulated and real.

The scenario's link drops to a third and recovers. The gain is the ratio of throughputs; the gain that the
simulator promises must be the one that the real, paced run shows.
"""

import math
from collections.abc import Callable

from executor.backend import TorchBackend, choose_emulator
from experiments.benches.result import Check
from experiments.scenario_choice import choose_scenario
from planner.backend import Backend
from planner.metrics import measure
from planner.policies import make_policy
from planner.strategies import make_plan
from sim.simulator import Simulator

SCENARIO = "two-regions"
POLICY = "depth"
STRATEGIES = ("megatron", "pipedream")

# Long enough for the link's drop and recovery, whichever plan runs.
STEPS = 50

LEAST_GAIN = 1.05
WORST_GAIN_DIFFERENCE = 0.10


def real_checks(tell: Callable[[str], None]) -> list[Check]:
    """Run pipelined plans with and without the policy in both backends; hold the two gains together."""
    scenario = choose_scenario(SCENARIO)
    real = TorchBackend("paced", emulator=choose_emulator("auto", tell), tell=tell)
    backends: dict[str, Backend] = {"simulated": Simulator(), "real": real}
    least, worst = math.inf, 0.0
    for strategy in STRATEGIES:
        plan = make_plan(strategy, scenario)
        gains = {}
        for name, backend in backends.items():
            tell(f"{SCENARIO}, {strategy}, {name}")
            plain = backend.run(scenario, plan, None, STEPS)
            adapted = backend.run(scenario, plan, make_policy(POLICY, scenario), STEPS)
            gains[name] = measure(adapted).samples_per_s / measure(plain).samples_per_s
        least = min(least, *gains.values())
        worst = max(worst, abs(gains["simulated"] - gains["real"]))
    return [
        Check("two regions: least gain of policy depth, simulated or real", least, LEAST_GAIN, at_most=False),
        Check("two regions: worst difference of simulated and real gain", worst, WORST_GAIN_DIFFERENCE, at_most=True),
    ]
