"""Simulated against real: the same plans and policies in both backends, over emulated links.

The real side runs in paced compute: true bytes, real scheduling and adaptation, profiled times. The simulator
runs first and is not told the outcome.
"""

from collections.abc import Callable

from executor.backend import TorchBackend
from experiments.benches.result import BenchResult, Check, Row
from experiments.scenario_choice import choose_scenario
from planner.metrics import measure
from planner.policies import make_policy
from planner.strategies import make_plan
from sim.simulator import Simulator

# Scenario, strategy, policy.
CASES = (
    ("cloud-edge-end", "megatron", "depth"),
    ("two-regions", "megatron", "none"),
    ("two-regions", "pipedream", "depth"),
    ("cloud-edge-end", "pipedream", "none"),
    ("cloud-edge-end", "megatron", "none"),
    ("cloud-edge-end", "ddp", "none"),
)
QUICK_CASES = 2
STEPS = 30

# Bars of this stage of the project; the step is the median over the run.
WORST_STEP_ERROR = 0.10
WORST_BYTE_DIFFERENCE = 0


def measure_fidelity(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Run every case in both backends and compare steps and bytes."""
    rows: list[Row] = []
    for scenario_name, strategy, policy in CASES[:QUICK_CASES] if quick else CASES:
        tell(f"{scenario_name}, {strategy}, {policy}")
        scenario = choose_scenario(scenario_name)
        plan = make_plan(strategy, scenario)
        simulated = measure(Simulator().run(scenario, plan, make_policy(policy, scenario), STEPS))
        backend = TorchBackend("paced", emulator="shaper")
        real = measure(backend.run(scenario, plan, make_policy(policy, scenario), STEPS))
        rows.append(
            {
                "scenario": scenario_name,
                "strategy": strategy,
                "policy": policy,
                "simulated_step_s": simulated.step_s,
                "real_step_s": real.step_s,
                "step_error": simulated.step_s / real.step_s - 1,
                "throughput_error": simulated.samples_per_s / real.samples_per_s - 1,
                "wan_byte_difference": simulated.wan_bytes - real.wan_bytes,
            }
        )
    worst_step = max(abs(float(row["step_error"])) for row in rows)
    worst_bytes = max(abs(float(row["wan_byte_difference"])) for row in rows)
    return BenchResult(
        rows,
        [
            Check("worst step error", worst_step, WORST_STEP_ERROR, at_most=True),
            Check("worst difference in WAN bytes", worst_bytes, WORST_BYTE_DIFFERENCE, at_most=True),
        ],
    )
