"""Simulated against real: the same plans and policies in both backends, over real TCP on emulated links.

The real side runs in paced compute: true bytes, real scheduling and adaptation, profiled times. Two more cases train
the example GPT, with times measured before. The simulator runs first and is not told the outcome.
"""

from collections.abc import Callable

import numpy as np
from scipy.stats import kendalltau

from executor.backend import TorchBackend, choose_emulator
from experiments.benches.result import BenchResult, Check, Row
from experiments.benches.simulation.fidelity_cases import Case, fidelity_cases
from experiments.benches.simulation.predicted import ROUNDS, predict_real_compute
from planner.runs.metrics import measure
from planner.systems.registry import make_policy
from sim.simulator import Simulator

# Of all cases, every so many-th with --quick.
QUICK_EVERY = 6

# Bars; the step of a run is the median over its steps.
MEDIAN_ERROR = 0.03
ERROR_OF_95 = 0.10
RANK_CORRELATION = 0.95
ERROR_OF_REAL = 0.10

# Policies under which a step has the same bytes whatever they decide.
_UNMOVED = ("none", "depth")

REAL_SCHEDULES = ("1f1b", "zb-h1")


def measure_fidelity(quick: bool, tell: Callable[[str], None]) -> BenchResult:
    """Run every case in both backends and compare steps and bytes."""
    # The bars are for real TCP.
    backend = TorchBackend("paced", emulator=choose_emulator("relay", tell), tell=tell)
    cases = fidelity_cases(tell)
    rows: list[Row] = []
    for case in cases[::QUICK_EVERY] if quick else cases:
        rows.append(_compare(case, backend))
        tell(f"{case.name}: {100 * float(rows[-1]['step_error']):+.1f} %")
    predicted = [predict_real_compute(schedule, tell, rounds=1 if quick else ROUNDS) for schedule in REAL_SCHEDULES]
    errors = np.abs([float(row["step_error"]) for row in rows])
    simulated, real = ([float(row[side]) for row in rows] for side in ("simulated_step_s", "real_step_s"))
    real_error = max(abs(float(row["step_error"])) for row in predicted)
    # A policy that moves layers may do so a step earlier or later, with links as they are then.
    unmoved = [row for row in rows if row["policy"] in _UNMOVED]
    byte_difference = max(abs(int(row["wan_byte_difference"])) for row in (*unmoved, *predicted))
    return BenchResult(
        [*rows, *predicted],
        [
            Check("worst step error of real compute", real_error, ERROR_OF_REAL, at_most=True),
            Check("median step error", float(np.median(errors)), MEDIAN_ERROR, at_most=True),
            Check("95th percentile of the step error", float(np.quantile(errors, 0.95)), ERROR_OF_95, at_most=True),
            Check("Kendall's rank correlation", float(kendalltau(simulated, real)[0]), RANK_CORRELATION, at_most=False),
            Check("largest WAN byte difference where no layers move", byte_difference, 0, at_most=True),
        ],
    )


def _compare(case: Case, backend: TorchBackend) -> Row:
    simulator = Simulator()
    simulated = measure(simulator.run(case.scenario, case.plan, make_policy(case.policy, case.scenario), case.steps))
    real = measure(backend.run(case.scenario, case.plan, make_policy(case.policy, case.scenario), case.steps))
    return {
        "case": case.name,
        "ranks": len(case.plan.devices),
        "policy": case.policy,
        "simulated_step_s": simulated.step_s,
        "real_step_s": real.step_s,
        "step_error": simulated.step_s / real.step_s - 1,
        "throughput_error": simulated.samples_per_s / real.samples_per_s - 1,
        "wan_byte_difference": simulated.wan_bytes - real.wan_bytes,
    }
