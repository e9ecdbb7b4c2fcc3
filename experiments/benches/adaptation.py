"""What adaptation gains: policy `depth` against no policy from the same plan, simulated and real.

The scenario's link drops to a third and recovers. The gain is the ratio of throughputs; the gain that the
simulator promises must be the one that the real, paced run shows.
"""

from collections.abc import Callable

from executor.backend import TorchBackend, choose_emulator
from experiments.benches.result import BenchResult, Check, Row
from experiments.scenario_choice import choose_scenario
from planner.backend import Backend
from planner.metrics import measure
from planner.policies import make_policy
from planner.strategies import STRATEGIES, make_plan
from sim.simulator import Simulator

SCENARIO = "two-regions"
POLICY = "depth"

# Long enough for the link's drop and recovery, whichever plan runs.
STEPS = 50
QUICK_STEPS = 30

LEAST_GAIN = 1.05
WORST_GAIN_DIFFERENCE = 0.10


def measure_adaptation(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Run pipelined plans with and without the policy in both backends."""
    scenario = choose_scenario(SCENARIO)
    steps = QUICK_STEPS if quick else STEPS
    real = TorchBackend("paced", emulator=choose_emulator("auto", tell), tell=tell)
    backends: dict[str, Backend] = {"simulated": Simulator(), "real": real}
    rows: list[Row] = []
    for strategy in [name for name in STRATEGIES if name != "ddp"]:
        plan = make_plan(strategy, scenario)
        gains, decisions = {}, {}
        for name, backend in backends.items():
            tell(f"{SCENARIO}, {strategy}, {name}")
            plain = backend.run(scenario, plan, None, steps)
            adapted = backend.run(scenario, plan, make_policy(POLICY, scenario), steps)
            gains[name] = measure(adapted).samples_per_s / measure(plain).samples_per_s
            decisions[name] = len(adapted.decisions)
        rows.append(
            {
                "strategy": strategy,
                "simulated_gain": gains["simulated"],
                "real_gain": gains["real"],
                "simulated_decisions": decisions["simulated"],
                "real_decisions": decisions["real"],
                "difference": gains["simulated"] - gains["real"],
            }
        )
    least = min(min(float(row["simulated_gain"]), float(row["real_gain"])) for row in rows)
    worst = max(abs(float(row["difference"])) for row in rows)
    return BenchResult(
        rows,
        [
            Check("least gain of the policy, simulated or real", least, LEAST_GAIN, at_most=False),
            Check("worst difference of simulated and real gain", worst, WORST_GAIN_DIFFERENCE, at_most=True),
        ],
    )
