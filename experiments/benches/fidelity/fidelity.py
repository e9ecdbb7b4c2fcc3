"""The bench ``fidelity``: errors of simulated throughputs and step times against real runs, and their limits."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from executor.backend import choose_emulator
from experiments.benches.fidelity.case import Case
from experiments.benches.fidelity.compare import Outcome, compare, gain_differences, rank_correlations
from experiments.benches.fidelity.hand_made import hand_made_cases
from experiments.benches.fidelity.kept import KeptRuns
from experiments.benches.fidelity.planned import DEMO, planned_cases
from experiments.benches.result import BenchResult, Check, Row, at_least, at_most
from experiments.benches.simulation.predicted import PREDICTED, ROUNDS, predict_real_compute
from planner.systems.registry import POLICIES

# Real runs of each case. With --quick, every sixth case is run, once.
REAL_RUNS = 3
QUICK_EVERY = 6

MEDIAN, ERROR_OF_95, WORST = 0.03, 0.08, 0.12
MEDIAN_DECIDING, WORST_DECIDING, WORST_GAIN = 0.04, 0.08, 0.05
MEDIAN_AS_IS = 0.05
RANK_CORRELATION = 0.95
ERROR_OF_REAL = 0.05
DEMO_ERROR = 0.05

REAL_SCHEDULES = ("1f1b", "zb-h1")


def fidelity_cases(tell: Callable[[str], None]) -> list[Case]:
    """Return all cases; without recorded traces, fewer, which is reported."""
    return [*hand_made_cases(tell), *planned_cases()]


def measure_fidelity(quick: bool, tell: Callable[[str], None], keep: Path | None = None) -> BenchResult:
    """Run every case in both backends, and compare throughputs, step times and bytes.

    If a folder ``keep`` is given, real runs of each case are kept there, and those that it has are not repeated.
    """
    kept = KeptRuns(keep)
    # The limits are for links that carry real TCP, which only the relay emulates.
    emulator = choose_emulator("relay", tell)
    cases = fidelity_cases(tell)
    outcomes: list[Outcome] = []
    for case in cases[::QUICK_EVERY] if quick else cases:
        outcome = compare(case, 1 if quick else case.runs or REAL_RUNS, emulator, tell, kept)
        outcomes.append(outcome)
        tell(f"{case.name}: {100 * outcome.throughput_error:+.1f} % in throughput, {100 * outcome.step_error:+.1f} %")
    predicted = [
        predict_real_compute(schedule, tell, case, rounds=1 if quick else ROUNDS)
        for case in (PREDICTED[:1] if quick else PREDICTED)
        for schedule in REAL_SCHEDULES
    ]
    checks = [*_errors(outcomes), *_agreements(outcomes), *_of_demo(outcomes), *_of_predicted(predicted)]
    return BenchResult(
        [*(outcome.row() for outcome in outcomes), *predicted], [*checks, *([] if quick else _breadth(outcomes))]
    )


def _errors(outcomes: Sequence[Outcome]) -> list[Check]:
    checks = []
    for what, errors in (
        ("throughput", {each.case.name: abs(each.throughput_error) for each in outcomes}),
        ("step", {each.case.name: abs(each.step_error) for each in outcomes}),
    ):
        every = list(errors.values())
        swaying = [errors[each.case.name] for each in outcomes if each.sways]
        deciding = [errors[each.case.name] for each in outcomes if each.decides]
        as_is = [errors[each.case.name] for each in outcomes if each.case.tcp == "as-is"]
        checks += [
            at_most(f"median {what} error", float(np.median(every)), MEDIAN),
            at_most(f"95th percentile of the {what} error", float(np.quantile(every, 0.95)), ERROR_OF_95),
            at_most(f"worst {what} error", max(every), WORST),
        ]
        if swaying:
            name = f"median {what} error, three ranks or more on shared or changing links"
            checks.append(at_most(name, float(np.median(swaying)), MEDIAN))
        if deciding:
            name = f"{what} error, a policy decides"
            checks.append(at_most(f"median {name}", float(np.median(deciding)), MEDIAN_DECIDING))
            checks.append(at_most(f"worst {name}", max(deciding), WORST_DECIDING))
        if as_is:
            name = f"median {what} error, TCP as this machine has it"
            checks.append(at_most(name, float(np.median(as_is)), MEDIAN_AS_IS))
    return checks


def _agreements(outcomes: Sequence[Outcome]) -> list[Check]:
    differences = {name: abs(each) for name, each in gain_differences(outcomes).items()}
    correlations = rank_correlations(outcomes).items()
    # Depths change no bytes, unlike layers that move.
    unmoved = [each.byte_difference for each in outcomes if each.case.policy in ("none", "depth")]
    checks = [
        *(at_least(f"Kendall's rank correlation in {name}", value, RANK_CORRELATION) for name, value in correlations),
        at_most("largest WAN byte difference, no layers move", max(unmoved, default=0), 0),
    ]
    if differences:
        name = "worst difference of a policy's simulated and real gain"
        checks.append(at_most(name, max(differences.values()), WORST_GAIN))
    return checks


def _of_demo(outcomes: Sequence[Outcome]) -> list[Check]:
    """Return the checks of every single real run of what `ropebridge demo` runs."""
    demo = next((each for each in outcomes if each.case.name == DEMO), None)
    if demo is None:
        return []
    return [
        at_most(f"worst throughput error of a run of the demo, {len(demo.real)} runs", demo.worst_of_a_run, DEMO_ERROR),
        at_most("most decisions that a run of the demo has more or fewer", demo.decisions_apart, 1),
        at_most("runs of the demo whose decisions are of other kinds", demo.unlike_decisions, 0),
    ]


def _of_predicted(predicted: Sequence[Row]) -> list[Check]:
    worst = max(abs(float(row["throughput_error"])) for row in predicted)
    different = max(abs(int(row["wan_byte_difference"])) for row in predicted)
    return [
        at_most("worst throughput error of real compute", worst, ERROR_OF_REAL),
        at_most("largest WAN byte difference of real compute", different, 0),
    ]


def _breadth(outcomes: Sequence[Outcome]) -> list[Check]:
    """Return checks that the cases are many and unlike each other."""
    cases = [each.case for each in outcomes]
    policies = {each.case.policy for each in outcomes if each.decides}
    return [
        at_least("cases", len(cases), 40),
        at_least("cases of three ranks or more", sum(case.ranks >= 3 for case in cases), 25),
        at_least("cases of three ranks or more on shared or changing links", sum(each.sways for each in outcomes), 20),
        at_least("cases with shared links", sum(case.has_shared_links for case in cases), 15),
        at_least("cases with traces", sum(case.has_traces for case in cases), 20),
        at_least("cases in which a policy decides", sum(each.decides for each in outcomes), 10),
        at_least("policies that decide in a case", len(policies), len(POLICIES) - 1),
        at_least("policies' gains that are compared", len(gain_differences(outcomes)), 6),
        at_least("scenarios in which plans are ranked", len(rank_correlations(outcomes)), 3),
        at_least("cases in which layers move", sum(each.moves_layers for each in outcomes), 6),
        at_least("cases with unequal replicas", sum(case.has_unequal_replicas for case in cases), 2),
        at_least("cases in which updates are stale", sum(each.simulated.metrics.staleness > 0 for each in outcomes), 3),
        at_least("cases with TCP as this machine has it", sum(case.tcp == "as-is" for case in cases), 8),
    ]
